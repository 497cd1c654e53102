"""Fused tiled attention for CuPy arrays, and for NumPy arrays on machines without a GPU.

The N x N matrix of scores is never stored. See `attention`; `python -m cuflash doctor` says what this machine can do.
"""

from __future__ import annotations

__version__ = "0.2.0"

from . import reference
from .cache import KVCache
from .dense import attention, attention_lse
from .doctor import show_config
from .explain import explain, warmup
from .explanation import Explanation
from .gated import chunk_gated_delta_rule, chunk_gated_output, recurrent_gated_delta_rule
from .kv_cache import attention_with_kv_cache
from .merge import merge_attention_states
from .options import check_environment, options
from .varlen import attention_varlen

__all__ = [
    "Explanation", "KVCache", "attention", "attention_lse", "attention_varlen", "attention_with_kv_cache",
    "chunk_gated_delta_rule", "chunk_gated_output", "explain", "merge_attention_states", "options",
    "recurrent_gated_delta_rule", "reference", "show_config", "warmup",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _compile_at_import() -> None:
    from .settings import read

    mode = read("CUFLASH_COMPILE")
    if mode not in ("import", "lazy"):
        import warnings

        warnings.warn(f"CUFLASH_COMPILE is {mode!r}, expected 'import' or 'lazy'; taken as 'import'", stacklevel=3)
    if mode == "lazy":
        return
    from .gpu.installed import driver_installed

    if driver_installed():
        from .gpu.core import compile_core_kernels

        compile_core_kernels()


def _check_environment() -> None:
    try:
        check_environment()
    except ValueError as error:
        import sys
        from itertools import pairwise

        if ("-m", "cuflash") in pairwise(sys.orig_argv):  # the command line has no other chance to say it in a sentence
            raise SystemExit(f"cuflash: {error}") from None
        raise


_check_environment()
_compile_at_import()
