"""Attention of NumPy arrays over some of the keys, and what that over several sets of keys is together.

In float64 and not normalised, so that what is merged is rounded once, and nothing grows with the number of merges.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem.arrays import ArrayInfo, shapes_given
from ..problem.problem import Problem
from ..problem.states import State, share_offset, writes_state
from ..settings import settings
from . import attention as cpu
from .blocks import Array
from .execute import announce, inputs_of


def empty_state(shape: tuple[int, ...]) -> State:
    """Return memory for the state of queries with an output of that shape."""
    return State(np.empty(shape), np.empty((*shape[:-1], 3)))


def attend_on_host(problem: Problem, infos: dict[str, ArrayInfo], state: State, keys: tuple[int, int]) -> None:
    """Compute a checked problem and write its state; `keys`: the place of its first key among all, and their number."""
    announce(problem, settings(), lambda: shapes_given(infos))
    arrays = inputs_of(problem, infos)
    cpu.attention(writes_state(problem, state), arrays | {"out": state.out, "lse": state.sums})
    share_offset(np, problem, infos, state.sums, keys)


def merge_states_on_host(states: Sequence[State], into: State) -> None:
    """Merge states in their order, in rows; the result may be the first of them."""
    with np.errstate(all="ignore"):  # infinities and NaN are values here
        largest = np.maximum.reduce([state.sums[..., 0] for state in states])
        factors = [np.exp(np.where(x.sums[..., 0] == largest, 0.0, x.sums[..., 0] - largest)) for x in states]
        total = sum(state.sums[..., 1] * factor for state, factor in zip(states, factors, strict=True))
        for state, factor in zip(states, factors, strict=True):
            if state is states[0]:
                np.multiply(state.out, factor[..., np.newaxis], out=into.out)
            else:
                np.add(into.out, state.out * factor[..., np.newaxis], out=into.out)
    into.sums[..., 0], into.sums[..., 1], into.sums[..., 2] = largest, total, states[0].sums[..., 2]


def finish_on_host(state: State, sinks: Array | None, out: Array, lse: Array | None) -> None:
    """Write results, with sinks let in."""
    # Contiguous: the last bits of NumPy 1.26's logarithms of strided arrays depend on where these lie.
    peak, total, offset = (np.ascontiguousarray(state.sums[..., i]) for i in range(3))
    logits = None if sinks is None else sinks.astype(np.float64)[..., np.newaxis]
    with np.errstate(all="ignore"):
        divisor, logs = cpu.close_rows(total, peak - offset, logits)
        if lse is not None:
            np.copyto(lse, cpu.bounded_lse(logs, lse.dtype), casting="same_kind")
        np.divide(state.out, divisor[..., np.newaxis], out=out, casting="same_kind")
