"""Attention over some of the keys, held so that it can be merged with that over others without a loss."""

from __future__ import annotations

from typing import Any, NamedTuple

from .problem import Problem


class State(NamedTuple):
    """Attention over some of the keys.

    One log-sum-exp would forget how many keys there were where logits are huge: the largest logit and the sum of
    exponentials are kept apart.
    """

    out: Any
    """(..., heads, queries, Dv) in the type of the computation, normalised; 0 where no key is seen."""
    sums: Any
    """(..., heads, queries, columns): the largest logit, the sum of exponentials relative to that, and on a GPU an
    offset that all logits of the row are lower by."""


def writes_state(problem: Problem, state: State) -> Problem:
    """Return the problem whose results are a state: sums in place of the lse."""
    strides = problem.strides._replace(out=state.out.strides, lse=state.sums.strides)
    return problem._replace(strides=strides, is_2d=False)
