"""The gate of `python -m cuflash bench`: how far results may be from float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..problem.arrays import DTYPES
from .inputs import AnyCase, to_host

ALLOWED_DRIFT = 1.1
"""Largest relative error of what drifts, in units of that of rounding the exact result."""


class Part(NamedTuple):
    """Some elements of a result."""

    result: str
    """Name of the argument."""
    place: tuple[Any, ...]
    """What the result is indexed with."""
    values: np.ndarray
    """What they are in float64."""


class Exact(NamedTuple):
    """What results of a problem are compared with."""

    case: AnyCase
    parts: list[Part]
    allowed: Mapping[str, float]
    """Largest relative error by dtype of the result; of others it is `ALLOWED_DRIFT`."""


class Verdict(NamedTuple):
    """What the comparison with float64 found."""

    mse: float
    """Mean squared error."""
    relative_error: float
    """Norm of the error over the norm of the exact result."""
    rounding_error: float
    """Relative error of the exact result once it is rounded to its dtype."""
    allowed: float
    finite: bool
    """Every element of the result, compared or not, is a number."""

    @property
    def good(self) -> bool:
        """Whether a speed may be printed."""
        return self.finite and self.relative_error <= self.allowed

    def __str__(self) -> str:
        finite = "" if self.finite else ", elements that are not finite"
        return f"relative error {self.relative_error:.1e}, allowed {self.allowed:.1e}{finite}"


def check(exact: Exact, results: Mapping[str, Any], xp: Any) -> Verdict:
    """Compare results with float64; the verdict is that on the worst of them.

    Parameters
    ----------
    exact : Exact
        Of the same problem.
    results : mapping of str to array
        By argument name, of the library `xp`; any float dtypes.
    xp : module
        numpy or cupy.
    """
    verdicts = [_check_result(exact, name, result, xp) for name, result in results.items()]
    return max(verdicts, key=lambda verdict: (not verdict.good, verdict.relative_error))


def _check_result(exact: Exact, name: str, result: Any, xp: Any) -> Verdict:
    parts = [part for part in exact.parts if part.result == name]
    dtype = exact.case.results[name].dtype
    values = np.concatenate([part.values.ravel() for part in parts])
    got = np.concatenate([to_host(result[part.place].astype(np.float64)).ravel() for part in parts])
    rounded = values.astype(DTYPES[dtype]).astype(np.float64)
    norm = float(np.linalg.norm(values)) or 1.0  # nothing is visible: only zeros are right
    error, rounding_error = (float(np.linalg.norm(x - values)) / norm for x in (got, rounded))
    allowed = exact.allowed.get(dtype, ALLOWED_DRIFT * rounding_error)
    mse = float(np.mean((got - values) ** 2)) if values.size else 0.0
    return Verdict(mse, error, rounding_error, allowed, _all_finite(result, xp))


def _all_finite(out: Any, xp: Any) -> bool:
    # Not every library has functions of bfloat16, but all convert it.
    return bool(xp.isfinite(out if out.dtype.itemsize > 2 else out.astype(np.float32)).all())
