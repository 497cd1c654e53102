"""Attention over some of the keys, merged with that over others: what rings of GPUs and graphs of tasks are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .cpu import states as host
from .cpu.execute import results_for as results_on_host
from .gpu import states as gpu
from .problem.arrays import HOST, computed_dtype
from .problem.describe import describe_attention
from .problem.problem import Problem, result_rows
from .problem.states import State


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    keys: tuple[int, int] | None = None,
    query_offset: int | None = None,
    into: State | None = None,
    **options: Any,
) -> State:
    """Attention over some of the keys.

    Parameters
    ----------
    q, k, v, **options
        Those of `cuflash.attention`, without `sinks` and what names results.
    query_offset : int, optional
        Position of the first query, counted from the first of these keys.
    keys : (start, total), optional
        Place of the first of these keys among all, and the number of all. By default these are all.
    into : State, optional
        Memory for the result.
    """
    problem, infos = describe_attention(q, k, v, query_offset=query_offset, return_lse=True, **options)
    if query_offset is not None:  # not clamped to the range of that of whole calls
        problem = problem._replace(query_offset=query_offset)
    traits, device = problem.traits, infos["q"].device
    shape = (*problem.batch, problem.num_heads_q, problem.seqlen_q, traits.head_dim_v)
    if device == HOST:
        state = host.empty_state(shape) if into is None else into
        host.attend_on_host(problem, infos, state, keys or (0, problem.seqlen_k))
    else:
        state = gpu.empty_state(shape, traits.lse_dtype, device) if into is None else into
        gpu.attend_on_gpu(problem, infos, state, keys or (0, problem.seqlen_k))
    return state


def empty_state(shape: tuple[int, ...], dtype: str, device: int) -> State:
    """Return memory for the state of queries with an output of that shape, computed in `dtype`."""
    return host.empty_state(shape) if device == HOST else gpu.empty_state(shape, computed_dtype(dtype), device)


def reset(state: State) -> State:
    """Write the state of queries that have seen nothing."""
    state.out[...], state.sums[...] = 0, 0
    state.sums[..., 0] = -np.inf
    return state


def merge(states: Sequence[State], into: State | None = None) -> State:
    """Attention over the keys of all states, which are merged in their order; `into` may be the first one."""
    first = states[0]
    if into is None:
        into = State(first.out.copy(), first.sums.copy())
    (host.merge_states_on_host if isinstance(first.out, np.ndarray) else gpu.merge_states_on_gpu)(states, into)
    return into


def finish(state: State, sinks: Any, out: Any, lse: Any) -> None:
    """Write attention over all keys, and perhaps its lse, with `sinks` (..., Hq) let in; those of a state are not."""
    if isinstance(state.out, np.ndarray):
        host.finish_on_host(state, sinks, out, lse)
    else:
        gpu.finish_on_gpu(state, sinks, out, lse)


def results_for(problem: Problem, device: int, out: Any, lse: Any) -> tuple[Any, Any]:
    """Allocate the results that a call names and is not given."""
    if device == HOST:
        return results_on_host(problem, result_rows(problem), out, lse)
    return gpu.results_for(problem, device, out, lse)


def rows_of(state: State, rows: slice) -> State:
    """View of the state of some queries."""
    return State(state.out[..., rows, :], state.sums[..., rows, :])
