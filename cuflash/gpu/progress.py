"""Says on stderr that kernels are being compiled: a bar of tqdm's if it is there and somebody watches, else a line."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, as_completed, wait
from contextlib import contextmanager
from threading import Timer
from typing import Any

SILENT_SECONDS = 0.5
"""Kernels from CuPy's disk cache are there before anything is said."""


def show_progress(jobs: list[Future[Any]], arch: str) -> None:
    """Wait until all jobs are done, each of which compiles a kernel."""
    begin = time.perf_counter()
    _, pending = wait(jobs, timeout=SILENT_SECONDS)
    if not pending:
        return
    done = as_completed(jobs)
    tqdm = _find_tqdm() if is_watched() else None
    if tqdm is not None:
        # Short, so that terminals of 80 columns have room for the bar.
        for _ in tqdm(done, desc=f"cuflash compiles for {arch}, once", total=len(jobs), unit="kernel"):
            pass
        return
    message = f"cuflash: compiling {len(jobs)} kernels for {arch}, once (CuPy keeps them on disk):"
    print(message, end="", file=sys.stderr, flush=True)
    for count, _ in enumerate(done, 1):
        print(f" {count}", end="", file=sys.stderr, flush=True)
    print(f", {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def tell_if_slow(kernel: str) -> Iterator[None]:
    """Name a single kernel that takes its time inside of the context, if somebody watches and would wonder."""
    if not is_watched():
        yield
        return
    message = f"cuflash: compiling {kernel}, once (CuPy keeps it on disk)"
    timer = Timer(SILENT_SECONDS, print, (message,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_watched() -> bool:
    """Whether stderr is a terminal, or the output of a notebook's cell."""
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and hasattr(get_ipython(), "kernel")


def _find_tqdm() -> Any:
    """The bar that suits a terminal or a notebook; None where tqdm is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without ipywidgets gets the plain bar
        try:
            from tqdm.auto import tqdm
        except ImportError:
            return None
    return tqdm
