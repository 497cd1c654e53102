"""Every CUFLASH_* environment variable, and what holds for a call: `options()` overrides some of them for a while.

CUFLASH_KERNEL, CUFLASH_TILE and CUFLASH_LOG are read once, at import: looking them up would cost more than the rest of
a call's bookkeeping. The others are read when they are needed. A value that no call could use fails at import,
and a variable that is none of them is a warning there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class Knob(NamedTuple):
    """One environment variable."""

    variable: str
    default: str
    meaning: str


KNOBS = (
    Knob("CUFLASH_COMPILE", "import", "when the core kernels are compiled: 'import', or 'lazy' for the first call that "
         "needs one; use 'lazy' in programs that fork, and in ranks that choose their GPU after the import"),
    Knob("CUFLASH_KERNEL", "", "name of the kernel to use; a call that it cannot serve raises (options(kernel=...))"),
    Knob("CUFLASH_TILE", "", "tile to use, such as 64x64; a call that it cannot serve raises (options(tile=...))"),
    Knob("CUFLASH_LOG", "0", "1: print one line per call, what was computed and by which kernel (options(log=True)); "
         "the logger cuflash of Python's logging says more"),
    Knob("CUFLASH_DUMP", "", "folder into which the source of every kernel is written that is loaded"),
    Knob("CUFLASH_NUM_THREADS", "", "threads of the NumPy back end; default: the usable cores"),
)  # fmt: skip
_PREFIX = "CUFLASH_"
_DEFAULTS = {knob.variable: knob.default for knob in KNOBS}


def read(variable: str) -> str:
    """Value of a CUFLASH_* variable, or its default."""
    return os.environ.get(variable, _DEFAULTS[variable])


def misspelt() -> list[str]:
    """Name CUFLASH_* variables that are set and read by nothing here, and the settings that they resemble."""
    found = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in _DEFAULTS)
    if not found:
        return []
    from difflib import get_close_matches

    known = [name.removeprefix(_PREFIX) for name in _DEFAULTS]
    close = [get_close_matches(name.removeprefix(_PREFIX).upper(), known, n=1) for name in found]
    return [
        f"{name} is set, and there is no such setting" + "".join(f" (did you mean {_PREFIX}{x}?)" for x in alike)
        for name, alike in zip(found, close, strict=True)
    ]


def num_threads(useful: int | None = None) -> int:
    """Threads of the NumPy back end, at most as many as are useful."""
    text = read("CUFLASH_NUM_THREADS")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"CUFLASH_NUM_THREADS is {text!r}, expected a positive int")
        limit = int(text)
    elif useful == 1 or _alone.get():
        limit = 1  # without asking the system
    elif hasattr(os, "sched_getaffinity"):
        limit = len(os.sched_getaffinity(0))
    else:
        limit = os.cpu_count() or 1
    return limit if useful is None else min(limit, useful)


_alone: ContextVar[bool] = ContextVar("cuflash_alone", default=False)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let calls of NumPy arrays inside use one thread, unless CUFLASH_NUM_THREADS says otherwise."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


class Settings(NamedTuple):
    """Choices that hold for every call in a context."""

    kernel: str
    tile: str
    log: bool


_CUPY_TF32 = os.environ.get("CUPY_TF32", "0").strip()
FLOAT32_PRECISION = "tf32" if _CUPY_TF32.isdecimal() and int(_CUPY_TF32) > 0 else "ieee"
"""What `precision=None` means for float32: CuPy's own switch, 1 or any positive number, which its products read once
as well; here it is read at import, as it decides which launches can be reused."""
AUTOMATIC = Settings("", "", False)
"""What holds when nobody has set anything."""
ENVIRONMENT = Settings(read("CUFLASH_KERNEL"), read("CUFLASH_TILE"), read("CUFLASH_LOG") not in ("", "0"))
"""What holds outside of any `options()`."""
current: ContextVar[Settings] = ContextVar("cuflash_options", default=ENVIRONMENT)

settings = current.get
"""Return the settings of this context: the innermost `options()`, else the environment as it was at import."""
