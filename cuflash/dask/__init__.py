"""`attention` of Dask arrays: a graph with one task for each chunk of queries and each chunk of keys that they see.

Not imported by `import cuflash`: programs that want it say ``import cuflash.dask``.
"""

from __future__ import annotations

try:
    import dask.array  # noqa: F401, as what follows needs it
except ImportError as error:
    raise ImportError("cuflash.dask needs Dask: pip install 'cuflash[distributed]'") from error

from .dense import attention

__all__ = ["attention"]


def __dir__() -> list[str]:
    return sorted(__all__)
