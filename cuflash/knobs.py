"""Every CUFLASH_* environment variable, and `options()`, which overrides some of them for a while.

CUFLASH_KERNEL, CUFLASH_TILE and CUFLASH_LOG are read once, at import: looking them up would cost more than the rest of
a call's bookkeeping. The others are read when they are needed. A value that no call could use fails at import.
"""

from __future__ import annotations

import os
import re
from contextvars import ContextVar
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


def unknown() -> list[str]:
    """CUFLASH_* variables that are set and read by nothing here: misspelt ones."""
    return sorted(name for name in os.environ if name.startswith("CUFLASH_") and name not in _DEFAULTS)


def num_threads(useful: int | None = None) -> int:
    """Threads of the NumPy back end, at most as many as are useful."""
    text = read("CUFLASH_NUM_THREADS")
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"CUFLASH_NUM_THREADS is {text!r}, expected a positive int")
        limit = int(text)
    elif useful == 1:
        limit = 1  # without asking the system
    elif hasattr(os, "sched_getaffinity"):
        limit = len(os.sched_getaffinity(0))
    else:
        limit = os.cpu_count() or 1
    return limit if useful is None else min(limit, useful)


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

_OPEN: ContextVar[tuple[options, ...]] = ContextVar("cuflash_options_open", default=())
"""The `options()` that this context is inside, outermost first; an object may be in it several times."""


def _check_kernel(name: str, kernel: str) -> None:
    from .plan.table import kernel_names

    if kernel and kernel not in kernel_names():
        raise ValueError(f"{name} is {kernel!r}, expected one of {', '.join(kernel_names())}")


def _check_tile(name: str, tile: str) -> None:
    if tile and not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){1,2}", tile):
        raise ValueError(f"{name} is {tile!r}, expected rows x keys, such as '64x64' or '64x64x2' with two buffers")


def check_environment() -> None:
    """Raise a ValueError that names a variable which no call could use."""
    _check_kernel("CUFLASH_KERNEL", _DEFAULT.kernel)
    _check_tile("CUFLASH_TILE", _DEFAULT.tile)
    if read("CUFLASH_LOG") not in ("", "0", "1"):
        raise ValueError(f"CUFLASH_LOG is {read('CUFLASH_LOG')!r}, expected '0' or '1'")
    num_threads()


settings = _CURRENT.get
"""Return the settings of this context: the innermost `options()`, else the environment as it was at import."""


class options:
    """Context manager that chooses kernel, tile and logging for the calls inside it.

    Holds for the current thread or task only (a `contextvars.ContextVar`) and nests; what an inner one leaves out, the
    outer one decides. Its defaults are the variables CUFLASH_KERNEL, CUFLASH_TILE and CUFLASH_LOG. One that is left
    before others that were entered later takes away what it chose, and nothing else.

    .. warning::
       A generator runs in the context of its caller. One that yields inside of `with options(...)` leaves them to its
       caller until it goes on or is closed: yield outside.

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
        For values of the wrong type, unknown kernels and what is no tile at once; a call that the kernel or the tile
        cannot serve raises a ValueError that says why.
    RuntimeError
        For an end in another context (thread, task, `contextvars.Context`) than the beginning. Nothing changes then: it
        still holds where it was entered, as nobody can change a context from outside.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((2, 8, 16), np.float32)
    >>> with cuflash.options(kernel="cpu"):
    ...     cuflash.attention(q, q, q).shape
    (2, 8, 16)
    """

    def __init__(self, *, kernel: str | None = None, tile: str | None = None, log: bool | None = None) -> None:
        for name, value in (("kernel", kernel), ("tile", tile)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a str")
        if log is not None and not isinstance(log, bool):
            raise TypeError(f"log is {log!r} ({type(log).__name__}), expected a bool")
        _check_kernel("kernel", kernel or "")
        _check_tile("tile", tile or "")
        self._given = (kernel, tile, log)

    def __enter__(self) -> None:
        _hold((*_OPEN.get(), self))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        entered = _OPEN.get()
        for index in reversed(range(len(entered))):
            if entered[index] is self:
                _hold(entered[:index] + entered[index + 1 :])
                return
        raise RuntimeError(
            f"{self} ends in a context that it was not entered in; leave it in the thread or task that entered it"
        )

    def __repr__(self) -> str:
        given = zip(Settings._fields, self._given, strict=True)
        return f"options({', '.join(f'{name}={value!r}' for name, value in given if value is not None)})"


def _hold(entered: tuple[options, ...]) -> None:
    """Make these the open `options()` of this context, and what they say together its settings."""
    chosen = _DEFAULT
    for one in entered:
        merged = (old if new is None else new for old, new in zip(chosen, one._given, strict=True))
        chosen = Settings(*merged)  # type: ignore[arg-type]
    _CURRENT.set(chosen)
    _OPEN.set(entered)
