"""Threads of the NumPy back end: a pool that survives forks, and BLAS kept to one thread meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


class OneBlasThread:
    """Context in which BLAS uses one thread, because the threads around it already use all cores.

    Most BLAS libraries know one limit for the whole process. Several threads may be inside at once; the first one in
    sets the limit and the last one out restores what was before. Libraries built on OpenMP have a limit per thread:
    there everybody sets and restores its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._libraries: list[Any] | None = None
        self._before: list[int] = []
        self._before_in_thread = threading.local()

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = _limit(self._find(per_thread=False))
            self._users += 1
        self._before_in_thread.limits = _limit(self._find(per_thread=True))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _restore(self._find(per_thread=True), self._before_in_thread.limits)
        with self._lock:
            self._users -= 1
            if not self._users:
                _restore(self._find(per_thread=False), self._before)

    def limit_this_thread(self) -> None:
        """Limit libraries that count per thread, for as long as this thread lives: for threads that do nothing else."""
        _limit(self._find(per_thread=True))

    def forget_users(self) -> None:
        """Leave for everybody: in a forked child the threads that were inside do not exist."""
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            _restore(self._find(per_thread=False), self._before)

    def _find(self, per_thread: bool) -> list[Any]:
        if self._libraries is None:
            # Imported late: `import cuflash` must stay quick, and finding the libraries takes milliseconds.
            from threadpoolctl import ThreadpoolController

            found = ThreadpoolController().select(user_api="blas").lib_controllers
            self._libraries = [library for library in found if library.num_threads is not None]
        return [library for library in self._libraries if (_layer(library) == "openmp") == per_thread]


def _layer(library: Any) -> str:
    return getattr(library, "threading_layer", "unknown")


def _limit(libraries: list[Any]) -> list[int]:
    """Set one thread and return what was before."""
    before = [library.num_threads for library in libraries]
    _restore(libraries, [1] * len(libraries))
    return before


def _restore(libraries: list[Any], limits: list[int]) -> None:
    for library, limit in zip(libraries, limits, strict=True):
        # From threadpoolctl 3.8 on only the thread that set a limit first may set it again, until that is cleared; but
        # the last one out is often another thread than the first one in.
        clear = getattr(library, "clear_controlling_thread", lambda force: None)
        clear(force=True)
        library.set_num_threads(limit)
        clear(force=True)


one_blas_thread = OneBlasThread()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_pool_lock = threading.Lock()


def run_on_threads(num_threads: int, work: Callable[[], None]) -> None:
    """Call `work()` in this thread and in up to `num_threads - 1` others; return when all are done.

    `work` must cope with fewer callers: the others are shared with every other call of this process.
    """
    pool = _shared_pool(num_threads - 1) if num_threads > 1 else None
    futures = [pool.submit(work) for _ in range(num_threads - 1)] if pool is not None else []
    try:
        work()
    finally:
        for future in futures:
            # What has not begun would find nothing left to do.
            if not future.cancel():
                future.result()


def _shared_pool(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _pool_lock:
        if _pool is None or _pool_size < size:
            from concurrent.futures import ThreadPoolExecutor

            # A smaller one that is still in use ends with its last call.
            _pool, _pool_size = ThreadPoolExecutor(size, "cuflash", one_blas_thread.limit_this_thread), size
        return _pool


def _after_fork_in_child() -> None:
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()
    one_blas_thread.forget_users()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
