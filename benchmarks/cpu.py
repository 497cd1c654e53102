"""Speed of the NumPy back end beside PyTorch's CPU attention (where PyTorch is installed) and naive NumPy; its memory.

Calls of cuflash and PyTorch alternate, after a pause in which the threads of the one before come to rest; naive NumPy
runs on its own, as its BLAS threads spin for longer. Medians are shown.

python benchmarks/cpu.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import cuflash
from cuflash import knobs

PROBLEMS = (
    (16, 2048, 64, False),
    (16, 2048, 64, True),
    (16, 2048, 128, False),
    (16, 512, 64, False),
    (1, 4096, 64, False),
)
"""Heads, sequence length, head_dim, causal."""


def naive(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """The N x N matrix in memory, as one writes it down."""
    scores = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        scores = np.where(np.tri(q.shape[-2], k.shape[-2], dtype=bool), scores, -np.inf).astype(q.dtype)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def torch_attention() -> Callable[..., Any] | None:
    """PyTorch's function on NumPy arrays without a copy, or None."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(knobs.num_threads())

    def compute(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Any:
        tensors = (torch.from_numpy(x)[None] for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)

    return compute


def medians(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Milliseconds of each function, its calls alternating with those of the others."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            time.sleep(0.03)
            begin = time.perf_counter()
            function()
            if repeat:
                times[name].append(time.perf_counter() - begin)
    return {name: 1e3 * float(np.median(values)) for name, values in times.items()}


def peak_memory(seqlen: int) -> float:
    """MiB that one head of a long sequence takes beside its inputs and results."""
    q = np.ones((1, seqlen, 64), np.float32)
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], np.float32)
    cuflash.attention(q[:, :64], q, q)
    tracemalloc.start()
    cuflash.attention(q, q, q, causal=True, out=out, lse=lse)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def main() -> int:
    """Print a Markdown table; exit status 1 when a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    peer = torch_attention()
    print(f"float32, {knobs.num_threads()} threads, milliseconds")
    print("| problem | cuflash | torch CPU | naive NumPy | torch / cuflash |\n|---|---:|---:|---:|---:|")
    rng = np.random.default_rng(0)
    for heads, seqlen, head_dim, causal in PROBLEMS:
        q, k, v = (rng.standard_normal((heads, seqlen, head_dim), dtype=np.float32) for _ in range(3))
        expected, _ = cuflash.reference.attention(q[:1, -50:], k[:1], v[:1], causal=causal)
        error = np.abs(cuflash.attention(q, k, v, causal=causal)[:1, -50:] - expected).max()
        if not error < 1e-5:
            print(f"{heads} x {seqlen} x {head_dim}: wrong by {error}", file=sys.stderr)
            return 1
        functions: dict[str, Callable[[], Any]] = {
            "cuflash": lambda q=q, k=k, v=v, causal=causal: cuflash.attention(q, k, v, causal=causal)
        }
        if peer is not None:
            functions["torch"] = lambda q=q, k=k, v=v, causal=causal: peer(q, k, v, causal)
        times = medians(functions, repeats)
        times |= medians({"naive": lambda q=q, k=k, v=v, causal=causal: naive(q, k, v, causal)}, 5)
        torch_time, ratio = "-", "-"
        if "torch" in times:
            torch_time, ratio = f"{times['torch']:.1f}", f"{times['torch'] / times['cuflash']:.2f}"
        label = f"{heads} heads, N {seqlen}, D {head_dim}, {'causal' if causal else 'full'}"
        print(f"| {label} | {times['cuflash']:.1f} | {torch_time} | {times['naive']:.1f} | {ratio} |")
    print(f"memory beside inputs and results, N 32768: {peak_memory(32768):.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
