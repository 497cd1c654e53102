"""Names of kernels, of all operations."""

from __future__ import annotations

from .gated import GATED_KERNELS
from .table import CPU_KERNEL, KERNELS


def kernel_names() -> list[str]:
    """Names that `options(kernel=...)` takes."""
    return [*(spec.name for spec in KERNELS), *(spec.name for spec in GATED_KERNELS), CPU_KERNEL]
