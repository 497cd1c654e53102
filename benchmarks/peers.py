"""Other ways to compute attention on a GPU, for comparison: naive CuPy, and PyTorch's back ends where PyTorch is
installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Peer = Callable[[Any, Any, Any, bool], Any]
"""Takes CuPy arrays q, k, v (batch, heads, sequence, feature) and `causal`; returns a function without arguments to
time."""


def naive_cupy(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
    """The N x N matrix in memory, as one writes it down."""
    import cupy

    scale = q.dtype.type(q.shape[-1] ** -0.5)
    hidden = None
    if causal:
        hidden = cupy.triu(cupy.ones((q.shape[-2], k.shape[-2]), bool), k.shape[-2] - q.shape[-2] + 1)

    def compute() -> Any:
        scores = q @ k.swapaxes(-1, -2)
        scores *= scale
        if hidden is not None:
            cupy.putmask(scores, cupy.broadcast_to(hidden, scores.shape), -cupy.inf)
        scores -= scores.max(-1, keepdims=True)
        cupy.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return scores @ v

    return compute


def torch_backend(name: str) -> Peer:
    """PyTorch's scaled_dot_product_attention, restricted to one of its back ends."""

    def prepare(q: Any, k: Any, v: Any, causal: bool) -> Callable[[], Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, name)
        tensors = [torch.from_dlpack(x) for x in (q, k, v)]

        def compute() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

        return compute

    return prepare


def peers() -> dict[str, Peer]:
    """Peers that can be imported here, by name."""
    found: dict[str, Peer] = {"naive CuPy": naive_cupy}
    try:
        import torch
    except ImportError:
        return found
    if torch.cuda.is_available():
        backends = {
            "cuDNN": "CUDNN_ATTENTION",
            "flash": "FLASH_ATTENTION",
            "efficient": "EFFICIENT_ATTENTION",
            "math": "MATH",
        }
        found |= {f"torch {label}": torch_backend(name) for label, name in backends.items()}
    return found
