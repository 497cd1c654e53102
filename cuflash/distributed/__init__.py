"""Attention over sequences that several processes hold in parts, one process to each GPU or each machine.

`attention` is called by all ranks of a communicator, each with its own queries, keys and values.
"""

from __future__ import annotations

from .dense import attention
from .layout import shard, unshard

__all__ = ["attention", "shard", "unshard"]


def __dir__() -> list[str]:
    return sorted(__all__)
