"""Attention over some of the keys, held so that it can be merged with that over others without a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .arrays import ArrayInfo
from .problem import Problem


class State(NamedTuple):
    """Attention over some of the keys.

    One log-sum-exp would forget how many keys there were where logits are huge: the largest logit and the sum of
    exponentials are kept apart.
    """

    out: Any
    """(..., heads, queries, Dv), 0 where no key is seen. On a GPU normalised, in the type of the computation; on the
    host the sum of weighted values, in float64."""
    sums: Any
    """(..., heads, queries, 3): the largest logit, the sum of exponentials relative to that, and an offset that all
    logits of the row are lower by, the same for all of its states. Of the type of `out`."""


def writes_state(problem: Problem, state: State) -> Problem:
    """Return the problem whose results are a state: sums in place of the lse."""
    strides = problem.strides._replace(out=state.out.strides, lse=state.sums.strides)
    return problem._replace(strides=strides, is_2d=False)


def share_offset(xp: Any, problem: Problem, infos: Mapping[str, ArrayInfo], sums: Any, keys: tuple[int, int]) -> None:
    """Give rows with slopes the offset that they have in front of all keys: that of the distance from the nearest one.

    Their own offset is that of the distance from the nearest key of the problem. The difference of the two is exact,
    where that of logits far away from all keys would not be. `keys` are the place of the first key among all, and the
    number of all; `xp` is the module of the arrays.
    """
    if "alibi_slopes" not in infos:
        return
    start, total = keys
    positions = xp.arange(problem.seqlen_q) + (problem.query_offset or 0)
    nearest = xp.abs(positions - xp.clip(positions, 0, max(problem.seqlen_k - 1, 0)))
    positions += start
    nearest_of_all = xp.abs(positions - xp.clip(positions, 0, max(total - 1, 0)))
    slopes = xp.asarray(infos["alibi_slopes"].array, sums.dtype)[..., np.newaxis]
    sums[..., 0] -= slopes * (nearest - nearest_of_all).astype(sums.dtype)
    limit = np.finfo(sums.dtype).max / 2
    sums[..., 2] = xp.clip(slopes * nearest_of_all.astype(sums.dtype), -limit, limit)
