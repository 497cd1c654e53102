"""A call in the process around it: its ends and its interrupts, other threads, and what BLAS was set to."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from threadpoolctl import threadpool_info, threadpool_limits

import cuflash
from cuflash.cpu import attention as cpu
from cuflash.cpu import threads
from cuflash.cpu.threads import run_on_threads, touching_first

PROGRAM = """
import atexit, signal, sys, threading, time
import numpy as np, cuflash
from cuflash.cpu import attention as cpu
from cuflash.cpu import threads
cpu.THREAD_COST = 1  # so that short calls have helpers
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 300, 32), dtype=np.float32)
call = lambda: cuflash.attention(q, k, v, causal=True)
print_digest = lambda: print(hash(call().tobytes()), flush=True)
"""


def in_a_new_process(code: str) -> list[str]:
    """Lines that a program prints; it may not print errors, nor hang."""
    environment = {"CUFLASH_NUM_THREADS": "3", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", PROGRAM + code]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


def _blas_threads() -> int:
    """What holds really, whatever threadpoolctl says."""
    return (threads._limit or threads._find_limit()).get()


needs_a_limit = pytest.mark.skipif(_blas_threads() < 2, reason="needs a BLAS library with several threads")


@pytest.mark.parametrize("earlier_call", [False, True])
@pytest.mark.parametrize(
    "late",
    [
        "threading.Thread(target=lambda: (threading.main_thread().join(), time.sleep(0.1), print_digest())).start()",
        "atexit.register(print_digest)",
        "threading.Thread(target=lambda: (threading.main_thread().join(), atexit.register(print_digest))).start()",
    ],
    ids=["thread", "atexit", "atexit after main"],
)
def test_calls_while_the_process_ends(late: str, earlier_call: bool) -> None:
    right = in_a_new_process("print_digest()")
    found = in_a_new_process(("print_digest()\n" if earlier_call else "") + late)
    assert found == right * (2 if earlier_call else 1)


def test_finalisers_while_the_interpreter_is_torn_down() -> None:
    """Modules can't be imported any more, so the first call came earlier."""
    first, late = in_a_new_process(
        "class Late:\n    def __del__(self): print_digest()\nprint_digest()\nlate = sys.modules['late'] = Late()"
    )
    assert first == late


def test_without_any_other_thread(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """As while the interpreter shuts down, from Python 3.12 on."""
    q, k, v = rng.standard_normal((3, 4, 300, 32), dtype=np.float32)
    right = cuflash.attention(q, k, v)

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(cpu, "THREAD_COST", 1)
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "_helpers", threads._Helpers())
    monkeypatch.setattr(threads._thread, "start_new_thread", refuse)
    assert cuflash.attention(q, k, v).tobytes() == right.tobytes()


INTERRUPTED = """
interrupts = 0

def interrupt(number, frame):
    global interrupts
    while frame is not None:
        if frame.f_code in (threads.run_on_threads.__code__, threads.run_alone.__code__):
            interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, again * np.random.random())
            raise KeyboardInterrupt
        frame = frame.f_back

signal.signal(signal.SIGALRM, interrupt)
call()
limit = threads._limit
before = limit.get()
out = np.empty_like(q)
ended = {True: 0, False: 0}
while ended[True] < 300 or ended[False] < 20 or (again and interrupts == ended[True]):
    rows = 20 + ended[True] % 2 * 280
    signal.setitimer(signal.ITIMER_REAL, np.random.random() * 0.002 + 1e-5)
    try:
        cuflash.attention(q[:, :rows], k, v, out=out[:, :rows])
        ended[False] += 1
    except KeyboardInterrupt:
        ended[True] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert (limit.get(), limit.inside, limit.before) == (before, {}, None)
    if ended[True] % 8 == 0:
        out[...] = 7
        time.sleep(0.002)
        assert (out == 7).all(), "written after the end of the call"
print("double" if interrupts > ended[True] else "single")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs setitimer")
@pytest.mark.parametrize(("again", "kind"), [(0.0, "single"), (1e-4, "double")])
def test_interrupts_leave_nothing_behind(again: float, kind: str) -> None:
    """Those that come again and again hit what a call does when it ends, too."""
    assert in_a_new_process(f"again = {again}\n{INTERRUPTED}") == [kind]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs setitimer")
@pytest.mark.parametrize("first_call", ["call()", ""], ids=["warm", "cold"])
def test_calls_in_a_signal_handler(first_call: str) -> None:
    code = """
from threadpoolctl import threadpool_info
before, handled = threadpool_info(), []
signal.signal(signal.SIGALRM, lambda *_: handled.append(call().tobytes()))
results = []
while len(handled) < 60:
    signal.setitimer(signal.ITIMER_REAL, np.random.random() * 0.002 + 1e-5)
    results.append(call().tobytes())
    signal.setitimer(signal.ITIMER_REAL, 0)
print(len(set(results + handled)), threadpool_info() == before)
"""
    assert in_a_new_process(first_call + code) == ["1 True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_in_the_middle_of_a_call_does_not_wait_for_its_helpers() -> None:
    code = """
import os, warnings
warnings.simplefilter("ignore")  # of forks beside threads
begun, go, main, pid = threading.Event(), threading.Event(), threading.get_ident(), None
def work(items):
    global pid
    for _ in items:
        if threading.get_ident() != main:
            begun.set(), go.wait()
        elif pid is None:
            begun.wait()
            pid = os.fork()
            go.set()
try:
    threads.run_on_threads(3, range(8), work)
except RuntimeError as error:
    print(error, len(call()), flush=True)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    error = "the process was forked during this call, whose other threads are not in the child"
    assert in_a_new_process(code) == [f"{error} 4", "3"]


def test_calls_in_finalisers(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """The garbage collector runs them in any thread, helpers included."""
    q, k, v = rng.standard_normal((3, 4, 300, 32), dtype=np.float32)
    right = cuflash.attention(q, k, v).tobytes()
    monkeypatch.setattr(cpu, "THREAD_COST", 1)
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "3")
    found = []

    class Calls:
        def __del__(self) -> None:
            found.append((threading.get_ident(), cuflash.attention(q, k, v).tobytes()))

    def work(items: Iterator[int]) -> None:
        for _ in items:
            Calls()

    for _ in range(20):
        run_on_threads(3, range(10), work)
    assert len(found) == 200
    assert len({thread for thread, _ in found}) > 1
    assert all(result == right for _, result in found)


@needs_a_limit
def test_blas_has_one_thread_inside_and_what_it_had_outside() -> None:
    before, inside = _blas_threads(), []
    meet = threading.Barrier(3, timeout=10)

    def work(items: Iterator[int]) -> None:
        for _ in items:
            meet.wait()
            inside.append(_blas_threads())

    run_on_threads(3, range(3), work)
    assert inside == [1, 1, 1]
    assert _blas_threads() == before


class _OtherThread:
    """A thread that does one thing after the other, and waits in between."""

    def __init__(self, *steps: Any) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(steps,), daemon=True)
        self._thread.start()

    def _run(self, steps: Any) -> None:
        for step in steps:
            self._go.acquire()
            step()
            self._done.release()

    def step(self) -> None:
        self._go.release()
        assert self._done.acquire(timeout=10)


@needs_a_limit
@pytest.mark.parametrize("name", ["get_num_threads", "set_num_threads"])
def test_limits_that_are_read_or_set_while_a_call_begins(name: str) -> None:
    def begin(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name == name and "threadpoolctl" in frame.f_code.co_filename:
            sys.setprofile(None)
            call.start()
            assert inside.wait(10)

    def work(items: Iterator[int]) -> None:
        for _ in items:
            inside.set()
            assert go_on.wait(10)
            found.append(_blas_threads())

    before, inside, go_on, found = _blas_threads(), threading.Event(), threading.Event(), []
    call = threading.Thread(target=lambda: run_on_threads(1, [0], work))
    sys.setprofile(begin)
    try:
        with threadpool_limits(2, user_api="blas"):
            sys.setprofile(None)
            go_on.set()
            call.join()
            assert (found, _blas_threads()) == ([1], 2)
    finally:
        sys.setprofile(None)
    assert _blas_threads() == before


@needs_a_limit
@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("order", ["ebbl", "eblb", "bebl", "belb"])
def test_limits_of_another_thread(order: str, limit: int) -> None:
    """Its `threadpool_limits` begins (e) and ends (l) before, in or after a call, which begins and ends (b)."""
    before, started, go_on = _blas_threads(), threading.Event(), threading.Event()
    limits: list[Any] = []
    other = _OtherThread(lambda: limits.append(threadpool_limits(limit)), lambda: limits[0].restore_original_limits())
    calls = _OtherThread(lambda: run_on_threads(2, [0], work))

    def work(items: Iterator[int]) -> None:
        for _ in items:
            started.set()
            assert go_on.wait(10)

    limited = inside = False
    for event in order:
        if event == "b" and not inside:
            calls._go.release()
            assert started.wait(10)
        elif event == "b":
            go_on.set()
            assert calls._done.acquire(timeout=10)
        else:
            other.step()
            limited = event == "e"
        inside ^= event == "b"
        expected = limit if limited else before
        assert _blas_threads() == (1 if inside else expected)
        assert {x["num_threads"] for x in threadpool_info() if x["filepath"] == _library_path()} == {expected}
    assert _blas_threads() == before


def _library_path() -> str:
    """File of the library that is limited: the first one, or NumPy's own."""
    paths = [str(x["filepath"]) for x in threadpool_info() if x["user_api"] == "blas"]
    return min(paths, key=lambda path: not path.startswith(os.path.dirname(os.path.realpath(np.__file__))))


class _FakeLibrary:
    """A BLAS library with a limit for each thread, as MKL has one."""

    internal_api, filepath = "mkl", "libmkl_rt.so"

    def __init__(self) -> None:
        self._local = threading.local()

    def get_num_threads(self) -> int:
        return getattr(self._local, "value", 4)

    num_threads = property(get_num_threads)

    def set_num_threads(self, num_threads: int) -> None:
        self._local.value = num_threads


@pytest.mark.parametrize("libraries", [[], [_FakeLibrary()]], ids=["no BLAS", "a limit for each thread"])
def test_other_libraries(libraries: list[_FakeLibrary], monkeypatch: pytest.MonkeyPatch) -> None:
    class Controller:
        lib_controllers = libraries

        def select(self, **_: str) -> Controller:
            return self

    monkeypatch.setattr(threadpoolctl, "ThreadpoolController", Controller)
    monkeypatch.setattr(threads, "_limit", None)
    inside, meet = [], threading.Barrier(3, timeout=10)

    def work(items: Iterator[int]) -> None:
        for _ in items:
            meet.wait()
            inside.extend(library.num_threads for library in libraries)

    run_on_threads(3, range(3), work)
    assert inside == [1, 1, 1] * len(libraries)
    assert all(library.num_threads == 4 for library in libraries)


def test_first_calls_at_the_same_time() -> None:
    """One of them finds the BLAS library for all, or each would restore what another has set."""
    code = """
from threadpoolctl import threadpool_info
sys.setswitchinterval(1e-6)
before, meet = threadpool_info(), threading.Barrier(6)
callers = [threading.Thread(target=lambda: (meet.wait(), call())) for _ in range(6)]
for caller in callers: caller.start()
for caller in callers: caller.join()
print(threadpool_info() == before, threads._limit.get() == before[0]["num_threads"])
"""
    assert in_a_new_process(code) == ["True True"]


def test_every_item_is_given_once() -> None:
    for num_threads in (1, 2, 7):
        given: list[int] = []
        run_on_threads(num_threads, range(1000), given.extend)
        assert sorted(given) == list(range(1000))


def test_an_error_ends_the_other_threads() -> None:
    meet, given = threading.Barrier(2, timeout=10), []

    def work(items: Iterator[int]) -> None:
        caller = threading.current_thread() is threading.main_thread()
        for item in items:
            if item < 2:
                meet.wait()
            if not caller:
                raise KeyError(item)
            given.append(item)
            threading.Event().wait(0.001)

    with pytest.raises(KeyError):
        run_on_threads(2, range(10_000), work)
    assert len(given) < 10_000


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot choose their core here")
@pytest.mark.parametrize(
    ("core_of_caller", "error", "moved_to"),
    [(5, None, {4, 6}), (5, PermissionError, {4, 6}), (7, None, None), (-1, None, None)],
    ids=["same core", "not permitted", "another core", "unknown"],
)
def test_a_helper_leaves_the_core_of_the_caller(
    core_of_caller: int, error: type[OSError] | None, moved_to: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller, moves = threading.get_ident(), []
    meet = threading.Barrier(2, timeout=10)

    def move(thread: int, cores: set[int]) -> None:
        moves.append((thread, cores))
        if error:
            raise error

    is_known = core_of_caller >= 0
    core = lambda: core_of_caller if threading.get_ident() == caller else 5 if is_known else -1  # noqa: E731
    monkeypatch.setattr(threads, "_current_core", core)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5, 6})
    monkeypatch.setattr(os, "sched_setaffinity", move)
    run_on_threads(2, range(2), lambda items: [meet.wait() for _ in items])  # type: ignore[arg-type,return-value]
    assert moves == ([] if moved_to is None else [(0, moved_to)])


def test_helpers_keep_nothing_alive() -> None:
    class Item:
        pass

    some = [Item() for _ in range(8)]
    seen = [weakref.ref(item) for item in some]

    def work(items: Iterator[Item]) -> None:
        with suppress(KeyError):  # a thread that comes late gets none
            for _ in items:
                raise KeyError
        raise ValueError

    for _ in range(3):
        with pytest.raises(ValueError):
            run_on_threads(3, some, work)
    del some
    busy = threading.Event()
    run_on_threads(3, [busy], lambda items: [event.wait(0.05) for event in items])  # type: ignore[arg-type,return-value]
    gc.collect()
    assert [reference() for reference in seen] == [None] * 8


def test_blas_touches_its_buffers_once_for_so_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_most_threads", 1)
    products, calls = [], []
    monkeypatch.setattr(threads.np, "matmul", lambda a, b: products.append(a.shape + b.shape))
    assert touching_first(1, calls.append) == calls.append
    first = touching_first(3, calls.append)
    assert touching_first(3, calls.append) == touching_first(2, calls.append) == calls.append
    first("work")
    assert len(products) == 1 and calls == ["work"]
