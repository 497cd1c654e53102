"""What a test of an attention kernel needs: problems, poisoned memory, the oracle and the error rule.

Used by cuflash's own tests and by anyone who adds a kernel. Problems are made with NumPy from a seed; `run` moves them
to either back end with the same strides, in memory whose unused bytes are NaN.
"""

from __future__ import annotations

from ..problem.arrays import DTYPES
from .attention import Outcome, check, describe, expected_shape, make_data, oracle, results_of, run
from .cases import Cached, Case, Data
from .memory import LAYOUTS, Poisoned

__all__ = [
    "DTYPES", "LAYOUTS", "Cached", "Case", "Data", "Outcome", "Poisoned", "check", "describe", "expected_shape",
    "make_data", "oracle", "results_of", "run",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
