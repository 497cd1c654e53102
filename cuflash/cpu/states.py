"""Attention of NumPy arrays over some of the keys, and what that over several sets of keys is together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem.arrays import DTYPES, ArrayInfo
from ..problem.problem import Problem
from ..problem.states import State, writes_state
from . import attention as cpu
from .blocks import Array
from .execute import inputs_of

COLUMNS = 2
"""Of sums: here no offset is needed, as they are in float64."""


def empty_state(shape: tuple[int, ...], dtype: str) -> State:
    """Return memory for the state of queries with an output of that shape."""
    return State(np.empty(shape, DTYPES[dtype]), np.empty((*shape[:-1], COLUMNS)))


def attend_on_host(problem: Problem, infos: dict[str, ArrayInfo], state: State) -> None:
    """Compute a checked problem and write its state."""
    arrays = inputs_of(problem, infos)
    cpu.attention(writes_state(problem, state), arrays | {"out": state.out, "lse": state.sums})


def merge_on_host(states: Sequence[State], into: State) -> None:
    """Merge states in their order, in rows; the result may be the first of them."""
    into.sums[...] = _merge_outs(states, into.out)


def finish_on_host(states: Sequence[State], out: Array, lse: Array | None) -> None:
    """Merge states, in their order, into results."""
    wide = out if out.dtype == states[0].out.dtype else np.empty_like(states[0].out)
    sums = _merge_outs(states, wide)
    if wide is not out:
        np.copyto(out, wide, casting="same_kind")
    if lse is not None:
        largest, total = sums[..., 0], sums[..., 1]
        with np.errstate(all="ignore"):
            logs = np.where(total == 0, -np.inf, largest + np.log(total))
        # What is finite in float64 is no sign of a row without a key, even if float32 cannot hold it.
        limit = np.finfo(lse.dtype).max
        np.copyto(lse, np.where(np.isfinite(logs), np.clip(logs, -limit, limit), logs), casting="same_kind")


def sinks_on_host(sinks: Array, state: State) -> State:
    """Return a state of no keys and one logit for each head."""
    sums = np.ones_like(state.sums)
    sums[..., 0] = np.asarray(sinks, np.float64)[..., np.newaxis]
    return State(np.broadcast_to(state.out.dtype.type(0), state.out.shape), sums)


def _merge_outs(states: Sequence[State], out: Array) -> Array:
    """Write the weighted outputs; return the sums."""
    with np.errstate(all="ignore"):  # infinities and NaN are values here
        largest = np.maximum.reduce([state.sums[..., 0] for state in states])
        weights = []
        for state in states:
            exponent, total = state.sums[..., 0], state.sums[..., 1]
            relative = np.exp(np.where(exponent == largest, 0.0, exponent - largest))
            weights.append(np.where(total == 0, 0.0, relative * total))
        whole = sum(weights[1:], weights[0])
        divisor = np.where(whole == 0, 1.0, whole)
        for state, weight in zip(states, weights, strict=True):
            share = (weight / divisor).astype(out.dtype)[..., np.newaxis]
            if state is states[0]:
                np.multiply(state.out, share, out=out)
            else:
                out += state.out * share
    return np.stack([largest, whole], axis=-1)
