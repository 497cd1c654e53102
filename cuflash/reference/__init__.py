"""What every function of cuflash means, in float64 NumPy and as plainly as possible.

This is the definition that the kernels are tested against, not an implementation to use: it holds all pairs of a query
and a key in memory at once and checks nothing. Only the arguments that decide the values exist here.
"""

from __future__ import annotations

from .dense import attention, attention_lse
from .gated import chunk_gated_output, gated_delta_rule
from .kv_cache import attention_with_kv_cache
from .merge import merge_attention_states
from .varlen import attention_varlen

__all__ = [
    "attention", "attention_lse", "attention_varlen", "attention_with_kv_cache", "chunk_gated_output",
    "gated_delta_rule", "merge_attention_states",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
