"""Partial results that are to be merged: arguments checked once, then held as plain data."""

from __future__ import annotations

from typing import Any, NamedTuple

from .arrays import FLOAT_NAMES, HOST, ITEMSIZE, ArrayInfo, computed_dtype, inspect, strides_like
from .checks import same_device
from .problem import Operand, alignment_of


class Parts(NamedTuple):
    """Checked partial results."""

    outs: list[ArrayInfo]
    """One for each part; only the first part if they are stacked on a GPU."""
    lses: list[ArrayInfo]
    num_parts: int
    strides: tuple[int, int] | None
    """Bytes from part to part of `outs` and `lses`, if they are stacked on a GPU."""


PAIRS = "; of (out, lse) pairs pass *zip(*pairs)"


def describe_parts(outs: Any, lses: Any) -> Parts:
    """Check the arguments of `merge_attention_states`."""
    out_infos, num_parts, out_step = _parts("outs", outs, 2)
    lse_infos, num_lses, lse_step = _parts("lses", lses, 1)
    if num_parts != num_lses:
        raise ValueError(f"lses has {num_lses} parts but outs has {num_parts}")
    first = out_infos[0]
    if first.dtype not in FLOAT_NAMES:
        raise TypeError(f"outs[0] has dtype {first.dtype}, expected float16, bfloat16, float32 or float64")
    lse_dtype = computed_dtype(first.dtype)
    for name, infos, dtype, shape in (
        ("outs", out_infos, first.dtype, first.shape),
        ("lses", lse_infos, lse_dtype, first.shape[:-1]),
    ):
        for i, info in enumerate(infos):
            if info.dtype != dtype:
                raise TypeError(f"{name}[{i}] has dtype {info.dtype}, expected {dtype} (outs[0] has {first.dtype})")
            if info.shape != shape:
                hint = PAIRS if (name, i, info.shape) == ("outs", 1, first.shape[:-1]) else ""
                raise ValueError(
                    f"{name}[{i}] has shape {info.shape}, expected {shape} (outs[0] has {first.shape}){hint}"
                )
            same_device(f"{name}[{i}]", info, "outs[0]", first)
    if out_step is not None and lse_step is not None and first.device != HOST:
        return Parts(out_infos, lse_infos, num_parts, (out_step, lse_step))
    return Parts(_each(out_infos, num_parts, out_step), _each(lse_infos, num_parts, lse_step), num_parts, None)


def _parts(name: str, x: Any, min_axes: int) -> tuple[list[ArrayInfo], int, int | None]:
    """Return the parts of an argument, their number and, if they are stacked, the first one alone and their stride."""
    axes = "..., Nq, Dv)" if min_axes == 2 else "..., Nq)"
    if isinstance(x, (list, tuple)):
        if x and isinstance(x[0], tuple):
            raise TypeError(f"{name}[0] is a tuple, expected an array{PAIRS}")
        infos, num_parts, step = [inspect(f"{name}[{i}]", part) for i, part in enumerate(x)], len(x), None
    else:
        whole = inspect(name, x)
        if len(whole.shape) <= min_axes:
            raise ValueError(f"{name} has shape {whole.shape}, expected (S, {axes}")
        num_parts, step = whole.shape[0], whole.strides[0]
        infos = [whole._replace(shape=whole.shape[1:], strides=whole.strides[1:])]
    if num_parts == 0:
        raise ValueError(f"{name} has no parts, expected at least one")
    if len(infos[0].shape) < min_axes:
        raise ValueError(f"{name}[0] has shape {infos[0].shape}, expected ({axes}")
    return infos, num_parts, step


def _each(infos: list[ArrayInfo], num_parts: int, step: int | None) -> list[ArrayInfo]:
    """Return all parts of stacked ones."""
    if step is None:
        return infos
    (first,) = infos
    return [first._replace(array=first.array[i], pointer=first.pointer + i * step) for i in range(num_parts)]


def result_operands(parts: Parts) -> tuple[Operand, Operand]:
    """Layout of `out` and `lse`."""
    operands = []
    for info in (parts.outs[0], parts.lses[0]):
        strides = strides_like(info.shape, parts.outs[0].strides, ITEMSIZE[info.dtype])
        operands.append(Operand(info.dtype, strides, alignment_of(0, info.shape, strides)))
    return operands[0], operands[1]
