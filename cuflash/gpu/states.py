"""Attention of GPU arrays over some of the keys, and what that over several sets of keys is together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..plan.partial import PARTIAL_COLUMNS, partial_traits
from ..plan.plan import make_plan
from ..problem.arrays import DTYPES, ArrayInfo, inspect
from ..problem.problem import ARRAYS, Operand, Problem
from ..problem.states import State, share_offset, writes_state
from ..settings import Settings, settings
from .compile import kernel_function
from .launch import Launch, device_info
from .merge import Merge, operands_of, plan_merge
from .workspace import launch_merge, results_of


def empty_state(shape: tuple[int, ...], dtype: str, device_id: int) -> State:
    """Return memory for the state of queries with an output of that shape."""
    import cupy

    with cupy.cuda.Device(device_id):
        return State(cupy.empty(shape, DTYPES[dtype]), cupy.empty((*shape[:-1], PARTIAL_COLUMNS), DTYPES[dtype]))


def results_for(problem: Problem, device_id: int, out: Any, lse: Any) -> tuple[Any, Any]:
    """Allocate the results that a call names and is not given."""
    import cupy

    new_out, new_lse = results_of(problem)
    with cupy.cuda.Device(device_id):
        out = new_out.allocate(cupy) if out is None and new_out is not None else out
        lse = new_lse.allocate(cupy) if lse is None and new_lse is not None else lse
    return out, lse


def attend_on_gpu(problem: Problem, infos: dict[str, ArrayInfo], state: State, keys: tuple[int, int]) -> None:
    """Compute a checked problem and write its state; `keys`: the place of its first key among all, and their number."""
    import cupy

    device_id = infos["q"].device
    problem = writes_state(problem._replace(traits=partial_traits(problem.traits)), state)
    launch = _launch_of(problem, device_id, settings())
    pointers = [infos[name].pointer if name in infos else 0 for name in ARRAYS]
    pointers[_OUT], pointers[_LSE] = state.out.data.ptr, state.sums.data.ptr
    launch.run(pointers, state.out, state.sums)
    with cupy.cuda.Device(device_id):
        share_offset(cupy, problem, infos, state.sums, keys)


@lru_cache(maxsize=1024)
def _launch_of(problem: Problem, device_id: int, chosen: Settings) -> Launch:
    return Launch(problem, make_plan(problem, device_info(device_id), chosen), device_id)


_OUT, _LSE = ARRAYS.index("out"), ARRAYS.index("lse")


def merge_states_on_gpu(states: Sequence[State], into: State) -> None:
    """Merge states in their order, in rows; the result may be the first of them."""
    _merge(states, into.out, into.sums)


def finish_on_gpu(state: State, sinks: Any, out: Any, lse: Any) -> None:
    """Write results, with sinks let in."""
    import cupy

    states = [state]
    if sinks is not None:
        with cupy.cuda.Device(state.sums.device.id):
            states = with_sinks(cupy, sinks, state)
    _merge(states, out, lse)


def with_sinks(xp: Any, sinks: Any, state: State) -> list[State]:
    """Return a state without its offset, and one of no keys and one logit for each head.

    A sink is small beside the offsets of rows far away from the keys, and would be lost in them.
    """
    plain = state._replace(sums=state.sums.copy())
    plain.sums[..., 0] -= plain.sums[..., 2]
    plain.sums[..., 2] = 0
    sums = xp.ones_like(plain.sums)
    sums[..., 0], sums[..., 2] = xp.asarray(sinks, sums.dtype)[..., np.newaxis], 0
    return [plain, State(xp.broadcast_to(xp.zeros((), sums.dtype), state.out.shape), sums)]


def _merge(states: Sequence[State], out: Any, sums: Any) -> None:
    import cupy

    outs, all_sums = [_info(x.out) for x in states], [_info(x.sums) for x in states]
    result, result_sums = _info(out), None if sums is None else _info(sums)
    merge = merge_of_states(outs, all_sums, result, result_sums)
    with cupy.cuda.Device(result.device):
        function = kernel_function(merge.program, result.device)
        at = [x.pointer for x in outs], [x.pointer for x in all_sums]
        launch_merge(function, merge, *at, result.pointer, result_sums.pointer if result_sums else 0)


def merge_of_states(
    outs: Sequence[ArrayInfo], all_sums: Sequence[ArrayInfo], out: ArrayInfo, sums: ArrayInfo | None
) -> Merge:
    """How states, `MAX_PARTS` at most, are merged into another one, or into results, whose `sums` are an lse."""
    merged, (result,) = (operands_of(outs), operands_of(all_sums)), operands_of([out])
    result_sums = operands_of([sums])[0] if sums else None
    return _merge_of(out.shape, *map(tuple, merged), result, result_sums)


@lru_cache(maxsize=1024)
def _merge_of(
    shape: tuple[int, ...],
    outs: tuple[Operand, ...],
    all_sums: tuple[Operand, ...],
    out: Operand,
    sums: Operand | None,
) -> Merge:
    return plan_merge(shape[:-1], shape[-1], outs, all_sums, out, sums, len(outs), None)


def _info(x: Any) -> ArrayInfo:
    return inspect("state", x)
