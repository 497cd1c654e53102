"""Threads of the NumPy back end, and BLAS kept to one thread meanwhile.

A call can begin and end anywhere: in a signal handler or a `__del__` that interrupts another call, in threads that
outlive the main one, in a forked child, by a KeyboardInterrupt at any moment. So the thread that calls takes part in
the work and waits for no lock: it asks others through a queue that can be entered again, and those that have not begun
when it is done are not waited for.

What has to happen however a call ends is in a `finally`, and a second KeyboardInterrupt must not keep it from
happening. Python runs signal handlers, and changes threads, only after calls, at jumps backward and at the beginning of
functions of its own; so such a block has none of these in front of its one call, which is a function of C. Python 3.10
runs them where a block begins, too, unless it begins with `try`.
"""

from __future__ import annotations

import _thread
import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import threadpoolctl

Item = TypeVar("Item")


def _python_function(name: str, result: Any, *arguments: Any, wait: bool = False) -> Any:
    """Return a function of the interpreter; one that may wait gives up the interpreter's lock."""
    prototype = ctypes.CFUNCTYPE if wait else ctypes.PYFUNCTYPE
    address = ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    return prototype(result, *arguments)(address)  # type: ignore[arg-type]


# Unlike the locks of `threading`, these are waited for without looking at signals.
_allocate_lock = _python_function("PyThread_allocate_lock", ctypes.c_void_p)
_acquire_lock = _python_function("PyThread_acquire_lock", ctypes.c_int, ctypes.c_void_p, ctypes.c_int, wait=True)
_release_lock = _python_function("PyThread_release_lock", None, ctypes.c_void_p)
_free_locks: deque[int] = deque()
"""Used again and never destroyed: a helper that comes too late still tries to acquire one."""


def _current_core_function() -> Callable[[], int]:
    """Return a function that says which core runs it, or -1 where threads cannot choose one."""
    library = ctypes.PyDLL(None) if hasattr(os, "sched_setaffinity") else None
    known: Callable[[], int] | None = getattr(library, "sched_getcpu", None)
    return known or (lambda: -1)


_current_core = _current_core_function()


def _leave_core(core: int) -> None:
    """Let this thread, a helper, run on any core but the given one, if that is where it runs.

    Threads of OpenBLAS spin for some 30 ms after a product. Where they keep all cores busy, Linux wakes a helper on the
    core of the thread that called, and the two would take turns.
    """
    if 0 <= core == _current_core():
        with suppress(OSError):
            others = os.sched_getaffinity(os.getpid()) - {core}
            if others:
                os.sched_setaffinity(0, others)


class _Call:
    """The work of one call: `items`, and the function that takes some of them."""

    def __init__(self, items: Iterable[Any], work: Callable[[Iterator[Any]], None]) -> None:
        self.items = deque(items)
        self.work = work
        self.stopped = False
        self.error: BaseException | None = None
        self.core = _current_core()
        """Of the thread that calls."""
        self.num_helpers = 0
        self.turn: int | None = None
        """Lock of the helpers, from the first one in to the last one out; then of the caller, for good."""

    def rest(self) -> Iterator[Any]:
        """Give items until none is left, or until the call has stopped; in several threads, each to one of them."""
        while not self.stopped:
            try:
                yield self.items.popleft()
            except IndexError:
                return


class _Limit:
    """Number of threads of a BLAS library: one while anybody is `inside`."""

    def __init__(self, get: Callable[[], int], set: Callable[[int], Any], process_wide: bool) -> None:
        self.get = get
        self.set = set
        self.process_wide = process_wide
        """Otherwise each thread has a limit of its own."""
        self.inside: dict[object, bool] = {}
        self.before: int | None = None
        """What holds again when the last one leaves; None while nobody is inside."""

        self.num_changes = 0
        """How often the first one has come in."""


_limit: _Limit | None = None
_at_work: set[_Call] = set()
"""Calls that may have helpers."""


def run_on_threads(num_threads: int, items: Iterable[Item], work: Callable[[Iterator[Item]], None]) -> None:
    """Call `work(some_items)` in this thread and in up to `num_threads - 1` others, with BLAS at one thread in each.

    Together the iterators give every item once. An error in one of the threads ends all of them, and is raised here; no
    thread is at work when this function has ended, in whatever way.
    """
    call = _Call(items, touching_first(num_threads, work))
    try:
        call.turn = _free_locks.pop()
    except IndexError:
        call.turn = _allocate_lock()
    try:
        _at_work.add(call)
        _helpers.ask(call, num_threads - 1)
        _take_part(call)
    finally:
        try:
            call.stopped = True
        finally:
            _acquire_lock(call.turn, 1)
        _at_work.discard(call)
        call.items.clear()  # helpers that are still to come keep nothing alive
        _release_lock(call.turn)
        _free_locks.append(call.turn)
    error, call.error = call.error, None
    if error is not None:
        try:
            raise error
        finally:
            del error  # it refers to this frame


def _take_part(call: _Call) -> None:
    try:
        run_alone(call.work, call.rest())
    finally:
        call.stopped = True


def run_alone(work: Callable[..., None], *arguments: Any) -> None:
    """Call a function in this thread, with BLAS at one thread."""
    found = _limit or _find_limit()
    limit = found if found.process_wide else _Limit(found.get, found.set, False)
    me = object()
    try:
        limit.inside[me] = True
        if limit.before is None:
            limit.num_changes += 1
            limit.before = limit.get()
        limit.set(1)
        work(*arguments)
    finally:
        try:
            if me in limit.inside:
                del limit.inside[me]
        finally:
            # Not a function of its own: a second interrupt would find one more place.
            if not limit.inside and limit.before is not None:
                before, limit.before = limit.before, None
                limit.set(before)


_most_threads = 0
"""Threads for which BLAS has touched its buffers."""


def touching_first(num_threads: int, work: Callable[..., None]) -> Callable[..., None]:
    """Return what is to be called in so many threads at the same time for work that is products, of float32 above all.

    OpenBLAS prefetches what lies behind an operand in a thread's buffer. A page there that nobody has written to does
    not exist, and to look for it takes hundreds of clocks, on virtual machines most of all: products of the same sizes
    take up to four times as long, however often they are computed. So a large one comes before the first ones.
    """
    global _most_threads
    if num_threads <= _most_threads:
        return work
    _most_threads = num_threads

    def touch_and_work(*arguments: Any) -> None:
        # Larger than its blocks: 320 by 768 and fewer by 320 elements. It takes some milliseconds.
        np.matmul(np.ones((136, 320), np.float32), np.ones((320, 800), np.float32))
        work(*arguments)

    return touch_and_work


class _Helpers:
    """Threads that wait for calls to help with. They end with the process, whatever they wait for."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._size = 0
        self._lock = Lock()  # for the helpers alone

    def ask(self, call: _Call, num_helpers: int) -> None:
        """Let up to so many helpers take part in a call."""
        while self._size < num_helpers:
            try:
                _thread.start_new_thread(self._serve, ())
            except RuntimeError:  # while the interpreter shuts down, or there are too many threads
                break
            self._size += 1
        for _ in range(min(num_helpers, self._size)):
            self._calls.put(call)

    def _serve(self) -> None:
        while True:
            call = self._calls.get()
            self._help(call)
            del call  # or it would keep arrays alive until the next one

    def _help(self, call: _Call) -> None:
        with self._lock:
            if not call.num_helpers and (call.stopped or not _acquire_lock(call.turn, 0)):
                return
            call.num_helpers += 1
        try:
            _leave_core(call.core)
            _take_part(call)
        except BaseException as error:
            call.error = error
        finally:
            with self._lock:
                call.num_helpers -= 1
                if not call.num_helpers:
                    _release_lock(call.turn)


_helpers = _Helpers()


def _find_limit() -> _Limit:
    """Find the BLAS library that NumPy calls, once: when it is needed, as that takes milliseconds."""
    global _limit
    libraries = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    libraries = [library for library in libraries if library.num_threads is not None]
    # Wheels of NumPy bring their own; what other packages' wheels bring is left alone.
    folder = os.path.dirname(os.path.realpath(np.__file__))
    libraries.sort(key=lambda library: not library.filepath.startswith(folder))
    if not libraries:
        limit = _Limit(lambda: 1, lambda num_threads: None, process_wide=False)
    else:
        library = libraries[0]
        openmp = getattr(library, "threading_layer", "unknown") == "openmp"
        per_thread = openmp or library.internal_api == "mkl"
        functions = _openblas_functions(library.filepath, openmp) if library.internal_api == "openblas" else None
        # Other libraries are set through Python: there a second interrupt, at the wrong moment, leaves one thread.
        get, set_ = functions or (library.get_num_threads, library.set_num_threads)
        limit = _Limit(get, set_, not per_thread)
        if not per_thread:
            _show_what_was_before(library)
    if _limit is None:  # another thread may have been quicker
        _limit = limit
    return _limit


def _openblas_functions(path: str, openmp: bool) -> tuple[Any, Any] | None:
    """Functions of C that return and set the number of threads, under the names that builds of OpenBLAS give them."""
    library = ctypes.PyDLL(path)
    names = [("omp_get_max_threads", "omp_set_num_threads")] if openmp else [
        (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
        for prefix in ("", "scipy_")
        for suffix in ("", "64_", "_64")
    ]  # fmt: skip
    for get, set_ in names:
        if hasattr(library, get) and hasattr(library, set_):
            return getattr(library, get), getattr(library, set_)
    return None


def _show_what_was_before(library: Any) -> None:
    """Let threadpoolctl read and change what holds after the calls at work, as if there were none.

    Otherwise a `threadpool_limits` that another thread enters during a call would take the one thread for what was
    before, and set it for good when it is left.
    """
    kind, path = type(library), library.filepath
    setter = "_real_set_num_threads" if hasattr(kind, "_real_set_num_threads") else "set_num_threads"
    get_really, set_really = kind.get_num_threads, getattr(kind, setter)

    def get_num_threads(self: Any) -> Any:
        if _limit is None or self.filepath != path:
            return get_really(self)
        while True:
            num_changes, before = _limit.num_changes, _limit.before
            found = get_really(self) if before is None else before
            if num_changes == _limit.num_changes:  # else it may be the one thread of a call that has begun
                return found

    def set_num_threads(self: Any, num_threads: int) -> Any:
        if _limit is None or self.filepath != path:
            return set_really(self, num_threads)
        while True:
            num_changes = _limit.num_changes
            if _limit.before is None:
                set_really(self, num_threads)
            else:
                _limit.before = num_threads
            if num_changes == _limit.num_changes and (_limit.inside or _limit.before is None):
                return
            # A call has begun, or the last one has ended, in between.
            if _limit.inside:
                _limit.set(1)
            else:
                _limit.before = None

    kind.get_num_threads = get_num_threads
    setattr(kind, setter, set_num_threads)


def _after_fork_in_child() -> None:
    # The other threads, helpers and callers, do not exist here.
    global _helpers
    _helpers = _Helpers()
    for call in _at_work:  # one may go on here: that which forked, or in which a signal handler did
        call.stopped = True
        call.error = RuntimeError("the process was forked during this call, whose other threads are not in the child")
        if call.num_helpers:
            call.turn = _allocate_lock()  # nobody would give the helpers' back
    _at_work.clear()
    if _limit is not None:
        _limit.inside.clear()
        if _limit.before is not None:
            before, _limit.before = _limit.before, None
            _limit.set(before)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
