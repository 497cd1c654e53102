"""CuPy and the folder in which it keeps compiled kernels; where that can't be written, they are compiled in memory."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import warnings
from importlib.util import find_spec
from itertools import count
from typing import Any

_warnings = count()
"""Several threads may meet the error; the one that draws 0 warns."""
_KERNEL_SIZE = 1 << 20
"""Bytes that a compiled kernel takes, at most."""


def cache_folder() -> str:
    """Folder in which CuPy keeps compiled kernels."""
    return os.environ.get("CUPY_CACHE_DIR", os.path.expanduser("~/.cupy/kernel_cache"))


def import_cupy() -> Any:
    """Import CuPy, which raises an OSError if its folder is missing and can't be made, and return it."""
    if "cupy" not in sys.modules and find_spec("cupy") is not None:
        given = os.environ.get("CUPY_CACHE_DIR")
        try:
            os.makedirs(cache_folder(), exist_ok=True)
        except OSError as error:
            compile_in_memory(error)
            # Any folder that exists will do: nothing is written.
            os.environ["CUPY_CACHE_DIR"] = os.path.dirname(os.path.abspath(__file__))
            try:
                import cupy
            finally:
                if given is None:
                    del os.environ["CUPY_CACHE_DIR"]
                else:
                    os.environ["CUPY_CACHE_DIR"] = given
    import cupy

    return cupy


def compile_in_memory(error: OSError) -> None:
    """Let CuPy leave its folder alone from now on, in this process and its children; the first time with a warning."""
    asked_for = os.environ.get("CUPY_CACHE_IN_MEMORY") == "1"
    os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
    if not asked_for and next(_warnings) == 0:
        warnings.warn(_nothing_kept(error), RuntimeWarning, stacklevel=2)


def why_nothing_is_kept() -> str:
    """Try to write into CuPy's folder; return why that fails, and what to do about it, "" if it works."""
    try:
        os.makedirs(cache_folder(), exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_folder()) as file:
            file.write(bytes(_KERNEL_SIZE))
    except OSError as error:
        return _nothing_kept(error)
    return ""


def _nothing_kept(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        remedy = f"free some space in {cache_folder()}, or export CUPY_CACHE_DIR=/a/folder/with/space"
    else:
        remedy = "export CUPY_CACHE_DIR=/a/folder/that/can/be/written"
    return f"CuPy cannot keep compiled kernels on disk ({error}), so every process compiles its own: {remedy}"
