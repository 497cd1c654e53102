"""Other ways to compute attention, for `python -m cuflash bench`, which finds this file beside the package.

`peers` names them: the formula as one writes it down, and PyTorch's function where PyTorch is installed. Each takes the
inputs of a problem and returns a function to time, or raises where it cannot serve the problem. `small_calls` and
`release` are optional.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from cuflash.bench.cases import Inputs
from cuflash.bench.check import visible
from cuflash.bench.measure import Peer
from cuflash.settings import num_threads

BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
"""Of PyTorch's scaled_dot_product_attention."""


def naive(backend: str) -> Peer:
    """The N x N matrix in memory."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        if backend == "gpu":
            import cupy as xp

            release()
        else:
            import numpy as xp

            if inputs.q.dtype.itemsize == 2:
                raise TypeError("NumPy multiplies matrices of 16 bits without BLAS")
        case, (q, k, v, bias) = inputs.case, inputs[1:]
        scale = q.dtype.type(case.head_dim**-0.5)
        hidden = ~visible(case, slice(None), xp) if case.causal or case.window is not None else None
        group_size = case.heads // case.kv_heads

        def compute() -> Any:
            keys, values = (x if group_size == 1 else x.repeat(group_size, axis=1) for x in (k, v))
            scores = q @ keys.swapaxes(-1, -2)
            scores *= scale
            if case.softcap is not None:
                scores = xp.tanh(scores / scores.dtype.type(case.softcap)) * scores.dtype.type(case.softcap)
            if bias is not None:
                scores += bias
            if hidden is not None:
                xp.putmask(scores, xp.broadcast_to(hidden, scores.shape), -xp.inf)
            scores -= scores.max(-1, keepdims=True)
            xp.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            return scores @ values

        return compute

    return prepare


def torch_options(inputs: Inputs, tensor: Callable[[Any], Any]) -> dict[str, Any]:
    """Keyword arguments of PyTorch's function for a problem; NotImplementedError where it has none."""
    case = inputs.case
    if case.window is not None or case.softcap is not None:
        raise NotImplementedError("has neither windows nor softcap")
    if case.causal and case.seqlen_q not in (1, case.seqlen_k):
        raise NotImplementedError("is causal from the top left")
    # One query at the last key sees everything; to PyTorch it would stand at the first.
    options: dict[str, Any] = {"is_causal": case.causal and case.seqlen_q > 1}
    if inputs.bias is not None:
        if case.causal:
            raise NotImplementedError("takes no bias beside causal")
        options["attn_mask"] = tensor(inputs.bias)[None]
    if case.heads != case.kv_heads:
        options["enable_gqa"] = True
    return options


def torch_gpu(name: str) -> Peer:
    """PyTorch's function on a GPU, restricted to one of its back ends, which raises what it cannot serve."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        release()
        warnings.filterwarnings("ignore", module=__name__)  # a back end that refuses also warns, at length
        backend = getattr(SDPBackend, name)
        tensors = [torch.from_dlpack(x) for x in inputs[1:4]]
        options = torch_options(inputs, torch.from_dlpack)

        def compute() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

        return compute

    return prepare


def torch_cpu(inputs: Inputs) -> Callable[[], Any]:
    """PyTorch's function on the CPU, with as many threads as the NumPy back end."""
    import torch

    def tensor(x: Any) -> Any:
        # PyTorch reads NumPy's float16, but not its bfloat16.
        return (
            torch.from_numpy(x.view("int16")).view(torch.bfloat16)
            if x.dtype.name == "bfloat16"
            else torch.from_numpy(x)
        )

    torch.set_num_threads(num_threads())
    tensors = [tensor(x) for x in inputs[1:4]]
    options = torch_options(inputs, tensor)
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def release() -> None:
    """Give back what PyTorch holds for later, so that it doesn't look as if others ran out of memory."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()


def peers(backend: str) -> dict[str, Peer]:
    """Peers that can be imported here, by name; `backend` is "gpu" or "numpy"."""
    found = {"naive CuPy" if backend == "gpu" else "naive NumPy": naive(backend)}
    try:
        import torch
    except ImportError:
        return found
    if backend == "numpy":
        # Before NumPy: the threads of its BLAS spin for a while when they are done.
        return {"torch CPU": torch_cpu, **found}
    if torch.cuda.is_available():
        found |= {f"torch {label}": torch_gpu(name) for label, name in BACKENDS.items()}
    return found


def small_calls(q: Any) -> dict[str, Callable[[], Any]]:
    """Calls on a small array (batch, heads, sequence, feature) whose host time is compared."""
    try:
        import torch
    except ImportError:
        return {}
    x = torch.from_dlpack(q)
    return {"torch SDPA call": lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x)}
