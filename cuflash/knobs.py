"""Every CUFLASH_* environment variable, and `options()`, which overrides some of them for a while.

CUFLASH_KERNEL, CUFLASH_TILE and CUFLASH_LOG are read once, at import: looking them up would cost more than the rest of
a call's bookkeeping. The others are read when they are needed.
"""

from __future__ import annotations

import os
from contextvars import ContextVar, Token
from types import TracebackType
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
    Knob("CUFLASH_LOG", "0", "1: print one line per call, what was computed and by which kernel (options(log=True))"),
    Knob("CUFLASH_DUMP", "", "folder into which every generated kernel source is written"),
    Knob("CUFLASH_NUM_THREADS", "", "threads of the NumPy back end; default: the usable cores"),
)  # fmt: skip
_DEFAULTS = {knob.variable: knob.default for knob in KNOBS}


def read(variable: str) -> str:
    """Value of a CUFLASH_* variable, or its default."""
    return os.environ.get(variable, _DEFAULTS[variable])


def num_threads() -> int:
    """Threads of the NumPy back end."""
    text = read("CUFLASH_NUM_THREADS")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"CUFLASH_NUM_THREADS is {text!r}, expected a positive int")
        return int(text)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Settings(NamedTuple):
    """Choices that hold for every call in a context."""

    kernel: str
    tile: str
    log: bool


FLOAT32_PRECISION = "tf32" if os.environ.get("CUPY_TF32") == "1" else "ieee"
"""What `precision=None` means for float32: CuPy's own switch, read once, as it decides which launches can be reused."""
AUTOMATIC = Settings("", "", False)
"""What holds when nobody has set anything."""
_DEFAULT = Settings(read("CUFLASH_KERNEL"), read("CUFLASH_TILE"), read("CUFLASH_LOG") not in ("", "0"))
_CURRENT: ContextVar[Settings] = ContextVar("cuflash_options", default=_DEFAULT)

_ENTERED: ContextVar[tuple[Token[Settings], ...]] = ContextVar("cuflash_options_entered", default=())
"""What the open `options()` of this context put back; not in the objects, which threads may share."""

settings = _CURRENT.get
"""Return the settings of this context: the innermost `options()`, else the environment as it was at import."""


class options:
    """Context manager that chooses kernel, tile and logging for the calls inside it.

    Holds for the current thread or task only (a `contextvars.ContextVar`) and nests; what an inner one leaves out, the
    outer one decides. Its defaults are the variables CUFLASH_KERNEL, CUFLASH_TILE and CUFLASH_LOG.

    Parameters
    ----------
    kernel : str, optional
        Name of a kernel as `python -m cuflash kernels` lists them, `"cpu"` for the NumPy back end, `""` for the
        automatic choice.
    tile : str, optional
        Tile of that kernel, such as `"64x64"`; `""` for the automatic choice.
    log : bool, optional
        Print one line per call on stderr: what is computed, and by which kernel and tile.

    Raises
    ------
    TypeError, ValueError
        For values of the wrong type and unknown kernels at once; a call that the kernel or the tile cannot serve raises
        a ValueError that says why.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((2, 8, 16), np.float32)
    >>> with cuflash.options(kernel="cpu"):
    ...     cuflash.attention(q, q, q).shape
    (2, 8, 16)
    """

    def __init__(self, *, kernel: str | None = None, tile: str | None = None, log: bool | None = None) -> None:
        from .kernels import kernel_names

        for name, value in (("kernel", kernel), ("tile", tile)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a str")
        if log is not None and not isinstance(log, bool):
            raise TypeError(f"log is {log!r} ({type(log).__name__}), expected a bool")
        if kernel and kernel not in kernel_names():
            raise ValueError(f"kernel is {kernel!r}, expected one of {', '.join(kernel_names())}")
        self._given = (kernel, tile, log)

    def __enter__(self) -> None:
        outer = settings()
        merged = (old if new is None else new for old, new in zip(outer, self._given, strict=True))
        token = _CURRENT.set(Settings(*merged))  # type: ignore[arg-type]
        _ENTERED.set((*_ENTERED.get(), token))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        *others, token = _ENTERED.get()
        _CURRENT.reset(token)
        _ENTERED.set(tuple(others))
