"""From a call to the back end that its arrays belong to: NumPy's on the CPU, all others on a GPU.

A repeated call is one look-up, in a table of the back end; NumPy's has none of packed sequences and caches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .cpu.execute import HostCall, execute_on_host, find_on_host
from .gpu.execute import execute_on_gpu, find_on_gpu
from .gpu.launch import Launch
from .problem.arrays import DTYPES, HOST, ArrayInfo
from .problem.problem import Problem
from .settings import settings

_IMMUTABLE = frozenset(
    (type(None), bool, int, float, str, type, *map(type, DTYPES.values()), *(dtype.type for dtype in DTYPES.values()))
)
"""Types of options whose values last as long as a key that holds them."""


def find(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple[Any, ...]
) -> tuple[Any, Launch | HostCall | None, Any]:
    """Look up an earlier call of the same form.

    Parameters
    ----------
    q, k, v, others
        The call's arrays in the order of the argument struct. None stands for one that the call has not (v too);
        `others` may be None, or end with the last array that is given.
    options
        Everything else that decides the call, hashable or not.

    Returns
    -------
    key, call, arrays
        The key is None where the table cannot help: arrays that are neither CuPy's nor NumPy's, options that cannot be
        hashed, a function that is none of `cpu.execute.REMEMBERED`. Of NumPy arrays the last is the arrays themselves,
        else their addresses.
    """
    if type(q) is np.ndarray:
        return find_on_host(q, k, v, others, options)
    return find_on_gpu(q, k, v, others, options)


def execute(problem: Problem, infos: dict[str, ArrayInfo], key: Any, out: Any, lse: Any) -> Any:
    """Compute a checked problem; `out` and `lse` are the caller's own objects, which are returned if given."""
    if key is not None and not _lasts(key[0]):
        key = None
    if infos["q"].device == HOST:
        return execute_on_host(problem, infos, key, settings(), out, lse)
    return execute_on_gpu(problem, infos, key, out, lse)


@lru_cache(maxsize=256)
def _lasts(options: tuple[Any, ...]) -> bool:
    """Whether options keep their values: an object that is equal to itself later may stand for another int then."""
    return all(_lasts(option) if type(option) is tuple else type(option) in _IMMUTABLE for option in options)
