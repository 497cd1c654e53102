"""Other ways to compute attention: `python -m cuflash bench --peers benchmarks/peers.py`.

`peers` names them: the formula as one writes it down, cuDNN by way of its own Python module, as one calls it with CuPy,
and PyTorch's function, each where it is installed. Each takes the inputs of a problem and returns a function to time,
or raises where it cannot serve the problem. `small_calls`, `release` and `versions` are optional.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from cuflash.bench.cases import Case, Inputs
from cuflash.bench.check import visible
from cuflash.bench.measure import Peer
from cuflash.settings import num_threads

BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
"""Of PyTorch's scaled_dot_product_attention."""


def naive(backend: str) -> Peer:
    """The N x N matrix in memory."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        if backend == "gpu":
            import cupy as xp

            release()
        else:
            import numpy as xp

            if inputs.q.dtype.itemsize == 2:
                raise TypeError("NumPy multiplies matrices of 16 bits without BLAS")
        case, q, bias, slopes = inputs.case, inputs.q, inputs.bias, inputs.alibi_slopes
        scale = q.dtype.type(case.head_dim**-0.5)
        hidden = ~visible(case, slice(None), xp) if case.causal or case.window is not None else None
        group_size = case.heads // case.kv_heads
        if slopes is not None:
            position = xp.arange(case.seqlen_q)[:, None] + (case.seqlen_k - case.seqlen_q)
            distance = abs(position - xp.arange(case.seqlen_k)).astype(slopes.dtype)

        def compute() -> Any:
            keys, *values = (x if group_size == 1 else x.repeat(group_size, axis=1) for x in inputs.arrays[1:])
            scores = q @ keys.swapaxes(-1, -2)
            scores *= scale
            if case.softcap is not None:
                scores = xp.tanh(scores / scores.dtype.type(case.softcap)) * scores.dtype.type(case.softcap)
            if bias is not None:
                scores += bias
            if slopes is not None:
                scores -= (slopes[:, None, None] * distance).astype(scores.dtype)
            if hidden is not None:
                xp.putmask(scores, xp.broadcast_to(hidden, scores.shape), -xp.inf)
            largest = scores.max(-1, keepdims=True)
            scores -= largest
            xp.exp(scores, out=scores)
            total = scores.sum(-1, keepdims=True)
            if not values:
                return (xp.log(total) + largest)[..., 0]
            scores /= total
            return scores @ values[0]

        return compute

    return prepare


def cudnn_options(case: Case, cudnn: Any) -> dict[str, Any]:
    """Keyword arguments of cuDNN's `sdpa` for a problem; NotImplementedError where it has none."""
    if case.softcap is not None:
        raise NotImplementedError("has no softcap")
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    if case.seqlen_q == 1:
        right = None  # no key is behind the last one
    options: dict[str, Any] = {"attn_scale": case.head_dim**-0.5, "use_alibi_mask": case.alibi}
    if left is not None or right is not None:
        # Aligned to the top left it serves more: a bias, and ALiBi.
        square = case.seqlen_q == case.seqlen_k
        options["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, "TOP_LEFT" if square else "BOTTOM_RIGHT")
    if left is not None:
        options["diagonal_band_left_bound"] = left + 1  # it counts the query's own key
    if right is not None:
        options["diagonal_band_right_bound"] = right
    return options


@cache
def cudnn_handle(device: int) -> Any:
    """The handle of a GPU, which must be the current one; it lives as long as the process."""
    import cudnn

    return cudnn.create_handle()


def cudnn_gpu(inputs: Inputs) -> Callable[[], Any]:
    """Build cuDNN's graph of a problem, and return its execution on CuPy's memory and current stream.

    Addresses are all that is passed, so that neither DLPack nor the dtypes that it knows matter. Strides are those of
    the arrays. What cuDNN cannot serve it refuses when the graph is built.
    """
    import cudnn
    import cupy

    release()
    case = inputs.case
    if case.dtype not in ("float16", "bfloat16"):
        raise NotImplementedError("computes float16 and bfloat16 only")
    dtype = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[case.dtype]
    handle = cudnn_handle(inputs.q.device.id)
    cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )

    def layout(x: Any) -> dict[str, list[int]]:
        return {"dim": list(x.shape), "stride": [step // x.itemsize for step in x.strides]}

    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if inputs.bias is not None:
        arrays["bias"] = inputs.bias.reshape(1, *inputs.bias.shape)  # a new axis has a stride of 0, which is no layout
    operands = {name: graph.tensor(name=name, data_type=dtype, **layout(x)) for name, x in arrays.items()}
    result, _ = graph.sdpa(name="sdpa", generate_stats=False, **operands, **cudnn_options(case, cudnn))
    out = cupy.empty(case.shape_out, inputs.q.dtype)
    result.set_output(True).set_data_type(dtype).set_dim(layout(out)["dim"]).set_stride(layout(out)["stride"])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = cupy.empty(max(1, graph.get_workspace_size()), "uint8")
    memory = {operands[name]: x for name, x in arrays.items()} | {result: out}

    def compute() -> Any:
        graph.execute({tensor: x.data.ptr for tensor, x in memory.items()}, workspace.data.ptr, handle=handle)
        return out

    return compute


def torch_options(inputs: Inputs, tensor: Callable[[Any], Any]) -> dict[str, Any]:
    """Keyword arguments of PyTorch's function for a problem; NotImplementedError where it has none."""
    case = inputs.case
    if case.window is not None or case.softcap is not None or case.alibi:
        raise NotImplementedError("has no windows, no softcap and no ALiBi")
    if case.causal and case.seqlen_q not in (1, case.seqlen_k):
        raise NotImplementedError("is causal from the top left")
    # One query at the last key sees everything; to PyTorch it would stand at the first.
    options: dict[str, Any] = {"is_causal": case.causal and case.seqlen_q > 1}
    if inputs.bias is not None:
        if case.causal:
            raise NotImplementedError("takes no bias beside causal")
        options["attn_mask"] = tensor(inputs.bias)[None]
    if case.heads != case.kv_heads:
        options["enable_gqa"] = True
    return options


def torch_gpu(name: str) -> Peer:
    """PyTorch's function on a GPU, restricted to one of its back ends, which raises what it cannot serve."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        release()
        warnings.filterwarnings("ignore", module=__name__)  # a back end that refuses also warns, at length
        backend = getattr(SDPBackend, name)
        tensors = [torch.from_dlpack(x) for x in inputs[1:4]]
        options = torch_options(inputs, torch.from_dlpack)

        def compute() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

        return compute

    return prepare


def torch_cpu(inputs: Inputs) -> Callable[[], Any]:
    """PyTorch's function on the CPU, with as many threads as the NumPy back end."""
    import torch

    def tensor(x: Any) -> Any:
        # PyTorch reads NumPy's float16, but not its bfloat16.
        return (
            torch.from_numpy(x.view("int16")).view(torch.bfloat16)
            if x.dtype.name == "bfloat16"
            else torch.from_numpy(x)
        )

    torch.set_num_threads(num_threads())
    tensors = [tensor(x) for x in inputs[1:4]]
    options = torch_options(inputs, tensor)
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def release() -> None:
    """Give back what PyTorch holds for later, so that it doesn't look as if others ran out of memory."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Of the libraries that have been imported."""
    found = {}
    if sys.modules.get("torch") is not None:
        found["torch"] = str(sys.modules["torch"].__version__)
    cudnn = sys.modules.get("cudnn")
    if cudnn is not None:
        found["cudnn-frontend"] = str(cudnn.__version__)
        with suppress(RuntimeError):  # the module is there without the library
            found["cuDNN"] = str(cudnn.backend_version_string())
    return found


def peers(backend: str) -> dict[str, Peer]:
    """Peers that can be imported here, by name; `backend` is "gpu" or "numpy"."""
    found = {"naive CuPy" if backend == "gpu" else "naive NumPy": naive(backend)}
    if backend == "gpu" and importlib.util.find_spec("cudnn") is not None:
        found["cuDNN"] = cudnn_gpu
    try:
        import torch
    except ImportError:
        return found
    if backend == "numpy":
        # Before NumPy: the threads of its BLAS spin for a while when they are done.
        return {"torch CPU": torch_cpu, **found}
    if torch.cuda.is_available():
        found |= {f"torch {label}": torch_gpu(name) for label, name in BACKENDS.items()}
    return found


def small_calls(q: Any) -> dict[str, Callable[[], Any]]:
    """Calls on a small array (batch, heads, sequence, feature) whose host time is compared."""
    try:
        import torch
    except ImportError:
        return {}
    x = torch.from_dlpack(q)
    return {"torch SDPA call": lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x)}
