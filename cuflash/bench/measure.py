"""One problem of `python -m cuflash bench`: the gate, then the speed of each kernel and each peer.

What is measured is plain data, ready for JSON. A problem holds its case and a list of results, one for each kernel and
each peer. A result has a `kernel` or a `peer`, and either a speed or the reason why there is none: `refused` (cannot
serve the case), `wrong` (does not pass the gate) or `failed` (raised).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..explain import explain, warmup
from ..explanation import Explanation
from ..options import options
from ..plan.table import CPU_KERNEL
from ..settings import settings
from .check import Exact, check
from .device import NumpyBackend
from .exact import exact_result
from .inputs import AnyCase, Inputs, make_inputs, stand_ins

Peer = Callable[[Inputs], Callable[[], Any]]
"""Takes the inputs and returns a function without arguments, to be timed; raises where it cannot serve the case. The
function returns an array of the inputs' library or, with `__dlpack__`, of another; where the case has several results,
a tuple in their order. It must not change the inputs."""

PEER_ERROR = 0.1
"""Relative error above which a peer computes something else."""


class Request(NamedTuple):
    """What to measure of each problem."""

    kernel: str = ""
    """Name of a row of the table, "all", or "" for the automatic choice."""
    tile: str = ""
    repeats: int = 9
    verify: bool = True

    def kernels(self, backend: str, case: AnyCase) -> list[str]:
        """What `options(kernel=...)` is given, in turn."""
        if self.kernel != "all":
            return [self.kernel]
        return case.kernels if backend == "gpu" else [CPU_KERNEL]


def compute(inputs: Inputs, results: Mapping[str, Any]) -> None:
    """Run the call that is measured."""
    inputs.case.function(**(inputs.arguments | dict(results)))


def measure(
    case: AnyCase, backend: NumpyBackend, request: Request, limits: Mapping[str, Any], peers: Mapping[str, Peer]
) -> dict[str, Any]:
    """Check and time a case with every kernel that is asked for, then time the peers, each after the other.

    Parameters
    ----------
    case : AnyCase
    backend : NumpyBackend
        Or `GpuBackend`.
    request : Request
    limits : mapping
        From `measure_limits`.
    peers : mapping of str to Peer
    """
    results: list[dict[str, Any]] = []
    try:
        inputs = make_inputs(case, backend.xp)
        exact = exact_result(inputs) if request.verify else None
        for kernel in request.kernels(backend.name, case):
            with chosen(kernel, request.tile):
                results.append(_measure_kernel(inputs, exact, backend, request, limits) | {"automatic": not kernel})
        for name, prepare in peers.items():
            backend.release()
            results.append({"peer": name} | _measure_peer(prepare, inputs, exact, backend, request, limits))
        del inputs
        backend.release()
    except Exception as error:  # no memory for the inputs, or a GPU that an earlier kernel has left unusable
        results.append({"kernel": request.kernel, "failed": f"{type(error).__name__}: {error}"})
    return {"name": case.name, **case._asdict(), "flops": case.flops, "bytes": case.bytes, "results": results}


def chosen(kernel: str, tile: str) -> options:
    """Pin kernel and tile; "" leaves the choice to the environment's variables."""
    return options(kernel=kernel or None, tile=tile or None)


def _measure_kernel(
    inputs: Inputs, exact: Exact | None, backend: NumpyBackend, request: Request, limits: Mapping[str, Any]
) -> dict[str, Any]:
    try:
        explanation = explain(inputs.case.function, **inputs.arguments)
    except ValueError as refusal:
        return {"kernel": settings().kernel, "refused": str(refusal)}
    result = describe(explanation)
    try:
        results = inputs.new_results(backend.xp)
        if exact is not None:
            compute(inputs, results)
            verdict = check(exact, results, backend.xp)
            if math.isfinite(verdict.mse):  # JSON has no other numbers
                result |= verdict._asdict()
            if not verdict.good:
                return result | {"wrong": str(verdict)}
        return result | speed(inputs.case, backend.times(lambda: compute(inputs, results), request.repeats), limits)
    except Exception as error:  # the other problems are measured all the same, and the command ends with status 1
        return result | {"failed": f"{type(error).__name__}: {error}"}


def describe(explanation: Explanation) -> dict[str, Any]:
    """Kernel, tile and plan line of a call."""
    found: dict[str, Any] = {"kernel": explanation.kernel, "tile": explanation.tile}
    if explanation.plan is None:
        found["plan"] = f"{explanation.kernel}, {explanation.num_threads} threads"
        return found
    found["plan"] = str(explanation.plan)
    if explanation.registers is not None:
        found |= {"registers": explanation.registers, "spill_bytes": explanation.spill_bytes}
        found["plan"] += f", {explanation.registers} registers, {explanation.spill_bytes} bytes spilled"
    return found


def speed(case: AnyCase, times: list[float], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Time and rates, and the fraction of the limit that binds: the products, or moving each array once."""
    seconds = statistics.median(times)
    flops, rate = case.flops / seconds, case.bytes / seconds
    of_compute = 1e-12 * flops / limits["gemm_tflops"][case.dtype]
    of_memory = 1e-9 * rate / limits["copy_gbs"]
    return {
        "seconds": seconds,
        "fastest_seconds": min(times),
        "runs": len(times),
        "tflops": 1e-12 * flops,
        "gbs": 1e-9 * rate,
        "ns_per_token": 1e9 * seconds / max(case.queries, 1),
        "bound": "memory" if of_memory > of_compute else "compute",
        "fraction_of_limit": max(of_memory, of_compute),
    }


def _measure_peer(
    prepare: Peer,
    inputs: Inputs,
    exact: Exact | None,
    backend: NumpyBackend,
    request: Request,
    limits: Mapping[str, Any],
) -> dict[str, Any]:
    try:
        function = prepare(inputs)
        result: dict[str, Any] = {}
        if exact is not None:
            result = _peer_error(function(), exact, backend)
            if result.get("relative_error", 0.0) > PEER_ERROR:
                return result | {"refused": "computes something else"}
        return result | speed(inputs.case, backend.times(function, request.repeats), limits)
    except Exception as refusal:  # a peer may refuse a case or run out of memory, each with its own exception
        first_line = next(iter(str(refusal).splitlines()), "")
        return {"refused": f"{type(refusal).__name__}: {first_line}"}


def as_array(out: Any, backend: NumpyBackend) -> Any:
    """Read a peer's result by the back end's library."""
    return out if isinstance(out, backend.xp.ndarray) else backend.xp.from_dlpack(out)


def _peer_error(returned: Any, exact: Exact, backend: NumpyBackend) -> dict[str, Any]:
    """Error of a peer's results; nothing where the back end's library cannot read them."""
    several = returned if isinstance(returned, tuple) else (returned,)
    try:
        arrays = [as_array(x, backend) for x in several]
    except Exception:  # NumPy knows no bfloat16 from other libraries
        return {}
    verdict = check(exact, dict(zip(exact.case.results, arrays, strict=True)), backend.xp)
    if not math.isfinite(verdict.mse):
        raise ValueError("the result is not finite")
    return {"mse": verdict.mse, "relative_error": verdict.relative_error, "rounding_error": verdict.rounding_error}


def compile_ahead(cases: Iterable[AnyCase], request: Request) -> None:
    """Compile in threads what the cases need on the GPU; what cannot be compiled is reported when it is measured."""
    import os
    from concurrent.futures import ThreadPoolExecutor
    from contextlib import suppress

    def compile_one(case: AnyCase, kernel: str) -> None:
        arrays = stand_ins(case)
        with suppress(Exception), chosen(kernel, request.tile):
            warmup(case.function, **arrays, **case.options)
            # For the plan line, which names registers: the compiler says how many only when it is asked again.
            explain(case.function, **arrays, **case.options)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in cases:
            for kernel in request.kernels("gpu", case):
                pool.submit(compile_one, case, kernel)
