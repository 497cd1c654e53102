"""`options()`: choices for the calls inside of it, and the checks of every choice."""

from __future__ import annotations

import os
import re
import warnings
from contextvars import ContextVar
from types import TracebackType

import numpy as np

from .plan.names import kernel_names
from .problem.hints import explains_unknown_names
from .settings import ENVIRONMENT, Settings, current, misspelt, num_threads, read

_OPEN: ContextVar[tuple[options, ...]] = ContextVar("cuflash_options_open", default=())
"""The `options()` that this context is inside, outermost first; an object may be in it several times."""


def _check_kernel(name: str, kernel: str) -> None:
    if kernel and kernel not in kernel_names():
        raise ValueError(f"{name} is {kernel!r}, expected one of {', '.join(kernel_names())}")


def _check_tile(name: str, tile: str) -> None:
    if tile and not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){1,2}[pw]?", tile):
        raise ValueError(
            f"{name} is {tile!r}, expected rows x keys, such as '64x64', '64x64x2' (two buffers), '64x64p' (prepared), "
            "'64x64w' (blocks walk on)"
        )


def check_environment() -> None:
    """Raise a ValueError that names a variable which no call could use; warn of those that nothing reads."""
    _check_kernel("CUFLASH_KERNEL", ENVIRONMENT.kernel)
    _check_tile("CUFLASH_TILE", ENVIRONMENT.tile)
    if read("CUFLASH_LOG") not in ("", "0", "1"):
        raise ValueError(f"CUFLASH_LOG is {read('CUFLASH_LOG')!r}, expected '0' or '1'")
    folder = read("CUFLASH_DUMP")
    if folder and os.path.exists(folder) and not os.path.isdir(folder):
        raise ValueError(f"CUFLASH_DUMP is {folder!r}, which is a file, expected a folder")
    num_threads()
    for line in misspelt():
        warnings.warn(line, stacklevel=4)  # at whoever imports the package


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
        Tile of that kernel, such as `"64x64"`, or of the first one that has it and serves the call; `""` for the
        automatic choice.
    log : bool, optional
        Print one line per call on stderr: what is computed, and by which kernel and tile. Python's logger ``cuflash``
        has more, for the whole process: at level INFO the plan of every new problem and the kernels that are compiled,
        at level DEBUG every call with the shapes of its arrays.

    Raises
    ------
    TypeError, ValueError
        For values of the wrong type, unknown kernels and what is no tile at once; a call that the kernel or the tile
        cannot serve raises a ValueError that says why.
    RuntimeError
        For an end in a context (thread, `contextvars.Context`) that it was not entered in. Nothing changes then: it
        still holds where it was entered, as nobody can change a context from outside. Nor does an end in a copy of that
        context, as each asyncio task has one, which ends it in the copy and raises nothing.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.ones((2, 8, 16), np.float32)
    >>> with cuflash.options(kernel="cpu"):
    ...     cuflash.attention(q, q, q).shape
    (2, 8, 16)
    """

    @explains_unknown_names
    def __init__(self, *, kernel: str | None = None, tile: str | None = None, log: bool | None = None) -> None:
        for name, value in (("kernel", kernel), ("tile", tile)):
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a str")
        if log is not None and not isinstance(log, (bool, np.bool_)):
            raise TypeError(f"log is {log!r} ({type(log).__name__}), expected a bool")
        _check_kernel("kernel", kernel or "")
        _check_tile("tile", tile or "")
        self._given = (kernel, tile, None if log is None else bool(log))

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
    chosen = ENVIRONMENT
    for one in entered:
        merged = (old if new is None else new for old, new in zip(chosen, one._given, strict=True))
        chosen = Settings(*merged)  # type: ignore[arg-type]
    current.set(chosen)
    _OPEN.set(entered)
