"""Other ways to compute the same: `python -m cuflash bench --peers benchmarks/peers.py`.

`peers` names those of attention: the formula as one writes it down, cuDNN by way of its own Python module, as one calls
it with CuPy, and PyTorch's function; `gated_peers` those of the gated delta rule: the definition as one writes it down,
and flash-linear-attention. All but what is written down are there where they are installed. Each takes the inputs of a
problem and returns a function to time, or raises where it cannot serve the problem. `gated_peers`, `small_calls`,
`release` and `versions` are optional.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from cuflash.bench.cases import Case
from cuflash.bench.exact import visible
from cuflash.bench.gated import CHUNKS, OUTPUT, RECURRENT
from cuflash.bench.inputs import Inputs, drawn_dtype
from cuflash.bench.measure import Peer
from cuflash.settings import num_threads

BACKENDS = {"cuDNN": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
"""Of PyTorch's scaled_dot_product_attention."""
MAX_STEPS = 8192
"""Tokens of a sequence, each some small launches of CuPy."""


def library(backend: str) -> Any:
    """NumPy, or CuPy with the memory that others hold for later."""
    if backend == "numpy":
        return importlib.import_module("numpy")
    release()
    return importlib.import_module("cupy")


def naive(backend: str) -> Peer:
    """The N x N matrix in memory."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        case, (q, *others) = inputs.case, (inputs.arrays.get(name) for name in ("q", "k", "v"))
        bias, slopes = (inputs.arrays.get(name) for name in ("bias", "alibi_slopes"))
        xp = library(backend)
        if backend == "numpy" and q.dtype.itemsize == 2:
            raise TypeError("NumPy multiplies matrices of 16 bits without BLAS")
        scale = q.dtype.type(case.head_dim**-0.5)
        hidden = ~visible(case, slice(None), xp) if case.causal or case.window is not None else None
        group_size = case.heads // case.kv_heads
        if slopes is not None:
            position = xp.arange(case.seqlen_q)[:, None] + (case.seqlen_k - case.seqlen_q)
            distance = abs(position - xp.arange(case.seqlen_k)).astype(slopes.dtype)

        def compute() -> Any:
            keys, *values = (x.repeat(group_size, axis=1) if group_size > 1 else x for x in others if x is not None)
            scores = q @ keys.swapaxes(-1, -2)
            scores *= scale
            if case.softcap is not None:
                scores = xp.tanh(scores / scores.dtype.type(case.softcap)) * scores.dtype.type(case.softcap)
            if bias is not None:
                scores += bias
            if slopes is not None:
                scores -= (slopes[:, None, None] * distance).astype(scores.dtype)
            if hidden is not None:
                xp.putmask(scores, xp.broadcast_to(hidden, scores.shape), -xp.inf)
            largest = scores.max(-1, keepdims=True)
            scores -= largest
            xp.exp(scores, out=scores)
            total = scores.sum(-1, keepdims=True)
            if not values:
                return (xp.log(total) + largest)[..., 0]
            scores /= total
            return scores @ values[0]

        return compute

    return prepare


def cudnn_options(case: Case, cudnn: Any) -> dict[str, Any]:
    """Keyword arguments of cuDNN's `sdpa` for a problem; NotImplementedError where it has none."""
    if case.softcap is not None:
        raise NotImplementedError("has no softcap")
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    if case.seqlen_q == 1:
        right = None  # no key is behind the last one
    options: dict[str, Any] = {"attn_scale": case.head_dim**-0.5, "use_alibi_mask": case.alibi}
    if left is not None or right is not None:
        # Aligned to the top left it serves more: a bias, and ALiBi.
        square = case.seqlen_q == case.seqlen_k
        options["diagonal_alignment"] = getattr(cudnn.diagonal_alignment, "TOP_LEFT" if square else "BOTTOM_RIGHT")
    if left is not None:
        options["diagonal_band_left_bound"] = left + 1  # it counts the query's own key
    if right is not None:
        options["diagonal_band_right_bound"] = right
    return options


@cache
def cudnn_handle(device: int) -> Any:
    """The handle of a GPU, which must be the current one; it lives as long as the process."""
    import cudnn

    return cudnn.create_handle()


def cudnn_gpu(inputs: Inputs) -> Callable[[], Any]:
    """Build cuDNN's graph of a problem, and return its execution on CuPy's memory and current stream.

    Addresses are all that is passed, so that neither DLPack nor the dtypes that it knows matter. Strides are those of
    the arrays. What cuDNN cannot serve it refuses when the graph is built.
    """
    import cudnn
    import cupy

    release()
    case = inputs.case
    if case.dtype not in ("float16", "bfloat16"):
        raise NotImplementedError("computes float16 and bfloat16 only")
    dtype = {"float16": cudnn.data_type.HALF, "bfloat16": cudnn.data_type.BFLOAT16}[case.dtype]
    handle = cudnn_handle(inputs.arrays["q"].device.id)
    cudnn.set_stream(handle=handle, stream=cupy.cuda.get_current_stream().ptr)
    graph = cudnn.pygraph(
        io_data_type=dtype,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )

    def layout(x: Any) -> dict[str, list[int]]:
        return {"dim": list(x.shape), "stride": [step // x.itemsize for step in x.strides]}

    arrays = {name: inputs.arrays[name] for name in ("q", "k", "v")}
    if case.bias:
        bias = inputs.arrays["bias"]
        arrays["bias"] = bias.reshape(1, *bias.shape)  # a new axis has a stride of 0, which is no layout
    operands = {name: graph.tensor(name=name, data_type=dtype, **layout(x)) for name, x in arrays.items()}
    result, _ = graph.sdpa(name="sdpa", generate_stats=False, **operands, **cudnn_options(case, cudnn))
    out = cupy.empty(case.shape_out, arrays["q"].dtype)
    result.set_output(True).set_data_type(dtype).set_dim(layout(out)["dim"]).set_stride(layout(out)["stride"])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = cupy.empty(max(1, graph.get_workspace_size()), "uint8")
    memory = {operands[name]: x for name, x in arrays.items()} | {result: out}

    def compute() -> Any:
        graph.execute({tensor: x.data.ptr for tensor, x in memory.items()}, workspace.data.ptr, handle=handle)
        return out

    return compute


def torch_options(inputs: Inputs, tensor: Callable[[Any], Any]) -> dict[str, Any]:
    """Keyword arguments of PyTorch's function for a problem; NotImplementedError where it has none."""
    case = inputs.case
    if case.window is not None or case.softcap is not None or case.alibi:
        raise NotImplementedError("has no windows, no softcap and no ALiBi")
    if case.causal and case.seqlen_q not in (1, case.seqlen_k):
        raise NotImplementedError("is causal from the top left")
    # One query at the last key sees everything; to PyTorch it would stand at the first.
    options: dict[str, Any] = {"is_causal": case.causal and case.seqlen_q > 1}
    if case.bias:
        if case.causal:
            raise NotImplementedError("takes no bias beside causal")
        options["attn_mask"] = tensor(inputs.arrays["bias"])[None]
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
        tensors = [torch.from_dlpack(inputs.arrays[name]) for name in ("q", "k", "v")]
        options = torch_options(inputs, torch.from_dlpack)

        def compute() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(*tensors, **options)

        return compute

    return prepare


def torch_cache(name: str) -> Peer:
    """PyTorch's function for a step of decoding, by one of its back ends: all keys of a contiguous cache."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        release()
        case = inputs.case
        if case.page_size or case.appends or len(set(case.lengths)) > 1:
            raise NotImplementedError("has no pages, no lengths of each sequence and appends nothing")
        backend = getattr(SDPBackend, name)
        tensors = [torch.from_dlpack(inputs.arrays[name]) for name in ("q", "k_cache", "v_cache")]

        def compute() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *tensors, enable_gqa=case.heads != case.kv_heads
                )

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
    tensors = [tensor(inputs.arrays[name]) for name in ("q", "k", "v")]
    options = torch_options(inputs, tensor)
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def naive_gated(backend: str) -> Peer:
    """The definition: a step for each token, and outputs of all chunks at once."""

    def prepare(inputs: Inputs) -> Callable[[], Any]:
        case, xp = inputs.case, library(backend)
        if len(set(case.lengths)) > 1:
            raise NotImplementedError("has one length for all sequences")
        if case.op == OUTPUT and case.lengths[0] % case.chunk_size:
            raise NotImplementedError("has whole chunks only")
        if case.op == CHUNKS and case.lengths[0] > MAX_STEPS:
            raise NotImplementedError(f"takes a step for each token, and {MAX_STEPS} at most")
        group_size, scale, wide = case.heads_v // case.heads, case.head_dim**-0.5, drawn_dtype(case.dtype)

        def widened(name: str, *rows: int) -> Any:
            """An array of tokens with other axes for them, and as many heads as v."""
            x = inputs.arrays[name].astype(wide)
            x = x.reshape(*rows, *x.shape[1 if case.op == OUTPUT else 2 :])
            return x.repeat(group_size, axis=2) if name in ("q", "k") and group_size > 1 else x

        def rule() -> Any:
            rows = len(case.lengths), case.lengths[0]
            q, k, v, log_g, beta = (widened(name, *rows) for name in ("q", "k", "v", "log_g", "beta"))
            shape = rows[0], case.heads_v, case.head_dim, case.head_dim_v
            state = inputs.arrays["state"].copy() if case.op == RECURRENT else xp.zeros(shape, wide)
            out = xp.empty_like(v)
            for t in range(rows[1]):
                state *= xp.exp(log_g[:, t, :, None, None])
                update = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, None] @ state)[:, :, 0])
                state += k[:, t, ..., None] * update[:, :, None]
                out[:, t] = scale * (q[:, t, :, None] @ state)[:, :, 0]
            result = out.reshape(case.results["out"].shape).astype(inputs.arrays["v"].dtype)
            return (result, state) if case.op == RECURRENT else result

        def output() -> Any:
            rows = len(case.chunks), case.chunk_size
            q, k, v, gates = (widened(name, *rows).swapaxes(1, 2) for name in ("q", "k", "v_new", "log_g_cumsum"))
            decay = xp.tril(xp.exp(xp.minimum(gates[..., None] - gates[..., None, :], 0)))
            out = xp.exp(gates)[..., None] * (q @ inputs.arrays["h"].astype(wide))
            out += (q @ k.swapaxes(-1, -2) * decay) @ v
            out *= scale
            return out.swapaxes(1, 2).reshape(case.results["out"].shape).astype(inputs.arrays["v_new"].dtype)

        return output if case.op == OUTPUT else rule

    return prepare


def linear_attention(inputs: Inputs) -> Callable[[], Any]:
    """flash-linear-attention, whose kernels are written in Triton."""
    import torch
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    release()
    case = inputs.case
    tensors = {name: torch.from_dlpack(x) for name, x in inputs.arrays.items()}
    boundaries = tensors["cu_seqlens"].long() if case.packed and len(case.lengths) > 1 else None
    scale = case.head_dim**-0.5
    if case.op == OUTPUT:
        q, k, v, h, g = (tensors[name][None] for name in ("q", "k", "v_new", "h", "log_g_cumsum"))
        options = {"scale": scale, "cu_seqlens": boundaries, "chunk_size": case.chunk_size}
        return lambda: chunk_fwd_o(q=q, k=k, v=v, h=h, g=g, **options)[0]
    arguments = {name: tensors[name] for name in ("q", "k", "v", "beta")} | {"g": tensors["log_g"], "scale": scale}
    if case.op == RECURRENT:
        arguments |= {"initial_state": tensors["state"], "output_final_state": True}
        return lambda: fused_recurrent_gated_delta_rule(**arguments)
    if case.chunk_size != 64:
        raise NotImplementedError("has chunks of 64 tokens")
    return lambda: chunk_gated_delta_rule(**arguments, cu_seqlens=boundaries)[0]


def release() -> None:
    """Give back what PyTorch holds for later, so that it doesn't look as if others ran out of memory."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Of the libraries that have been imported."""
    modules = {"torch": "torch", "triton": "triton", "fla": "flash-linear-attention"}
    imported = {label: sys.modules.get(name) for name, label in modules.items()}
    found = {label: str(module.__version__) for label, module in imported.items() if module is not None}
    cudnn = sys.modules.get("cudnn")
    if cudnn is not None:
        found["cudnn-frontend"] = str(cudnn.__version__)
        with suppress(RuntimeError):  # the module is there without the library
            found["cuDNN"] = str(cudnn.backend_version_string())
    return found


def peers(backend: str) -> dict[str, Peer]:
    """Peers that can be imported here, by name; `backend` is "gpu" or "numpy"."""
    found = {"naive CuPy" if backend == "gpu" else "naive NumPy": naive(backend)}
    if backend == "gpu" and importlib.util.find_spec("cudnn") is not None:
        found["cuDNN"] = cudnn_gpu
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


def cache_peers(backend: str) -> dict[str, Peer]:
    """Peers for caches of keys and values that can be imported here, by name."""
    if backend == "numpy" or importlib.util.find_spec("torch") is None:
        return {}
    return {f"torch {label}": torch_cache(name) for label, name in BACKENDS.items() if label in ("cuDNN", "flash")}


def gated_peers(backend: str) -> dict[str, Peer]:
    """Peers of the gated delta rule that can be imported here, by name."""
    if backend == "numpy":
        return {"naive NumPy": naive_gated(backend)}
    installed = all(importlib.util.find_spec(name) is not None for name in ("torch", "fla"))
    return {"naive CuPy": naive_gated(backend)} | ({"linear attention": linear_attention} if installed else {})


def small_calls(q: Any) -> dict[str, Callable[[], Any]]:
    """Calls on a small array (batch, heads, sequence, feature) whose host time is compared."""
    try:
        import torch
    except ImportError:
        return {}
    x = torch.from_dlpack(q)
    return {"torch SDPA call": lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x)}
