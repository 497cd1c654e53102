"""NumPy arrays: from a checked problem to the CPU back end, results allocated as `numpy.empty_like` would."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from . import cpu
from .arrays import DTYPES, ArrayInfo
from .kernels import CPU_KERNEL
from .knobs import Settings
from .problem import Operand, Problem, result_rows


def execute_on_host(problem: Problem, infos: dict[str, ArrayInfo], chosen: Settings, out: Any, lse: Any) -> Any:
    """Compute a problem of NumPy arrays; `out` and `lse` are the caller's own objects, which are returned if given."""
    check_settings(chosen)
    if chosen.log:
        print(f"cuflash: {problem} -> {CPU_KERNEL}", file=sys.stderr)
    rows = result_rows(problem)
    out = allocate((*rows, problem.head_dim_v), problem.out) if out is None else out
    if problem.lse is not None and lse is None:
        lse = allocate(rows, problem.lse)
    arrays = _inputs(problem, infos)
    arrays["out"], arrays["lse"] = (x[None] if problem.is_2d and x is not None else x for x in (out, lse))
    if problem.op == "attention_varlen":
        cpu.attention_varlen(problem, arrays)
    else:
        cpu.attention(problem, arrays)
    return out if problem.lse is None else (out, lse)


def check_settings(chosen: Settings) -> None:
    """Raise ValueError if `options(kernel=..., tile=...)` asks for what the NumPy back end is not."""
    if chosen.kernel not in ("", CPU_KERNEL):
        raise ValueError(f"kernel {chosen.kernel!r} cannot serve this call: it needs GPU arrays, these are NumPy's")
    if chosen.tile:
        raise ValueError(f"tile {chosen.tile!r} cannot serve this call: the NumPy back end has no choice of tile")


def allocate(shape: tuple[int, ...], operand: Operand) -> np.ndarray:
    """Return a new array of an operand's layout."""
    dtype = DTYPES[operand.dtype]
    strides = operand.strides[len(operand.strides) - len(shape) :]
    return np.ndarray(shape, dtype, np.empty(max(1, prod(shape)), dtype), 0, strides)


def _inputs(problem: Problem, infos: dict[str, ArrayInfo]) -> dict[str, np.ndarray | None]:
    """Views of the inputs, broadcast to the axes of the problem; None for options that the call has not."""
    if problem.op == "attention_varlen":
        batch: tuple[int, ...] = ()
        rows: tuple[int, ...] = (problem.seqlen_q, problem.num_heads_q)
        keys: tuple[int, ...] = (problem.seqlen_k, problem.num_heads_kv)
    else:
        batch = problem.batch
        rows = (*batch, problem.num_heads_q, problem.seqlen_q)
        keys = (*batch, problem.num_heads_kv, problem.seqlen_k)
    heads = (*problem.batch, problem.num_heads_q)
    shapes = {
        "q": (*rows, problem.head_dim),
        "k": (*keys, problem.head_dim),
        "v": (*keys, problem.head_dim_v),
        "bias": (*rows, problem.seqlen_k),
        "mask": (*rows, problem.seqlen_k),
        "alibi_slopes": heads,
        "sinks": heads,
        "query_offset": batch,
        "cu_seqlens_q": (problem.batch[0] + 1,) if problem.cu_seqlens_q else (),
        "cu_seqlens_k": (problem.batch[0] + 1,) if problem.cu_seqlens_k else (),
    }
    arrays: dict[str, np.ndarray | None] = {
        name: np.broadcast_to(infos[name].array, shape) if name in infos else None for name, shape in shapes.items()
    }
    arrays["query_offsets"] = arrays.pop("query_offset")
    return arrays
