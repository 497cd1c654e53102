"""`merge_attention_states`: the public function that joins attention over disjoint keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from .cpu.execute import allocate
from .gpu.combine import MAX_PARTS, Combination, combine_parts
from .gpu.compile import kernel_function
from .gpu.workspace import Result, allocate_with_workspace, launch_combination
from .plan.splits import partial_layout
from .problem.arrays import DTYPES, FLOAT_NAMES, HOST, ITEMSIZE, ArrayInfo, inspect, strides_like
from .problem.checks import same_device
from .problem.problem import Operand, alignment_of

if TYPE_CHECKING:
    from .problem.types import AnyArray, NumpyArray, Pair


@overload
def merge_attention_states(
    outs: NumpyArray | Sequence[NumpyArray], lses: AnyArray | Sequence[AnyArray]
) -> tuple[NumpyArray, Any]: ...
@overload
def merge_attention_states(outs: AnyArray | Sequence[AnyArray], lses: AnyArray | Sequence[AnyArray]) -> Pair: ...
def merge_attention_states(outs: Any, lses: Any) -> Any:
    r"""Join results of attention over disjoint sets of keys into that over all of them.

    With part :math:`s` giving ``outs[s]`` and ``lses[s]``, row by row [1]_ [2]_

    .. math:: \mathrm{lse} = \log \sum_s e^{\mathrm{lse}_s}, \qquad
              \mathrm{out} = \sum_s e^{\mathrm{lse}_s - \mathrm{lse}} \, \mathrm{out}_s .

    Any way of dividing the keys will do: caches on several devices, a shared prefix, a chunk at a time. With `causal`,
    a `window` or ALiBi each part must be told where the queries stand among its own keys: for keys that begin at
    ``start`` pass ``query_offset=offset - start``, where ``offset`` is that of the whole call, by default ``Nk - Nq``.
    With as many queries as keys, or from the top left, that is ``causal=True, query_offset=-start``. Left out, the last
    query would stand at the last key of each part, which is a valid call too: no error can tell.

    Parameters
    ----------
    outs : array, shape (S, ..., Nq, Dv), or sequence of S arrays of shape (..., Nq, Dv)
        Normalised results, as `attention` returns them: float16, bfloat16, float32 or float64, at least one, all of one
        dtype and shape. Any strides. Neither stacked nor copied, however they are given.
    lses : array, shape (S, ..., Nq), or sequence of S arrays of shape (..., Nq)
        Their log-sum-exp, natural logarithm: float32, or float64 for outs of float64.

    Returns
    -------
    out : array, shape (..., Nq, Dv)
        Of the dtype of `outs`; it lies in memory in the axis order of the first one.
    lse : array, shape (..., Nq)
        Of the dtype of `lses`. A row that no part has a key for gives 0 and ``-inf``.

    Raises
    ------
    TypeError
        Not arrays, wrong or mixed dtypes, NumPy mixed with GPU arrays.
    ValueError
        No parts, different numbers of them, shapes or devices that differ. All errors name argument, got and expected,
        and are raised before anything is launched.

    See Also
    --------
    attention : With ``return_lse=True`` it returns what this function takes.

    Notes
    -----
    Parts are joined in their order, in float32 (float64 for float64): results are repeatable to the bit. A part with an
    lse of ``-inf`` has weight exactly 0, whatever its `out` holds; one of ``+inf`` (an infinite sink) leaves no weight
    to finite ones, and NaN makes its row NaN. A sink belongs to one of the parts only. Never synchronises. More than 16
    GPU arrays that are not stacked are joined 16 at a time, through partial results in scratch memory.

    References
    ----------
    .. [1] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867.
    .. [2] T. Dao, D. Haziza, F. Massa, G. Sizov, "Flash-Decoding for long-context inference", 2023,
       https://pytorch.org/blog/flash-decoding/.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 8, 100, 64), dtype=np.float32)
    >>> parts = [cuflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 30), slice(30, 100))]
    >>> out, lse = cuflash.merge_attention_states(*zip(*parts))
    >>> np.allclose(out, cuflash.attention(q, k, v), atol=1e-6)
    True

    Causal, with fewer queries than keys, which makes the offset of the whole call 60:

    >>> q, options = q[:, :40], {"causal": True, "return_lse": True}
    >>> slices = slice(0, 30), slice(30, 100)
    >>> parts = [cuflash.attention(q, k[:, s], v[:, s], query_offset=60 - s.start, **options) for s in slices]
    >>> out, lse = cuflash.merge_attention_states(*zip(*parts))
    >>> np.allclose(out, cuflash.attention(q, k, v, causal=True), atol=1e-5)
    True
    """
    parts = describe_parts(outs, lses)
    return _merge_on_host(parts) if parts.outs[0].device == HOST else _merge_on_gpu(parts)


class Parts(NamedTuple):
    """Checked partial results."""

    outs: list[ArrayInfo]
    """One for each part; only the first part if they are stacked on a GPU."""
    lses: list[ArrayInfo]
    num_parts: int
    strides: tuple[int, int] | None
    """Bytes from part to part of `outs` and `lses`, if they are stacked on a GPU."""


def describe_parts(outs: Any, lses: Any) -> Parts:
    """Check the arguments of `merge_attention_states`."""
    out_infos, num_parts, out_step = _parts("outs", outs, 2)
    lse_infos, num_lses, lse_step = _parts("lses", lses, 1)
    if num_parts != num_lses:
        raise ValueError(f"lses has {num_lses} parts but outs has {num_parts}")
    first = out_infos[0]
    if first.dtype not in FLOAT_NAMES:
        raise TypeError(f"outs[0] has dtype {first.dtype}, expected float16, bfloat16, float32 or float64")
    lse_dtype = "float64" if first.dtype == "float64" else "float32"
    for name, infos, dtype, shape in (
        ("outs", out_infos, first.dtype, first.shape),
        ("lses", lse_infos, lse_dtype, first.shape[:-1]),
    ):
        for i, info in enumerate(infos):
            if info.dtype != dtype:
                raise TypeError(f"{name}[{i}] has dtype {info.dtype}, expected {dtype} (outs[0] has {first.dtype})")
            if info.shape != shape:
                raise ValueError(f"{name}[{i}] has shape {info.shape}, expected {shape} (outs[0] has {first.shape})")
            same_device(f"{name}[{i}]", info, "outs[0]", first)
    if out_step is not None and lse_step is not None and first.device != HOST:
        return Parts(out_infos, lse_infos, num_parts, (out_step, lse_step))
    return Parts(_each(out_infos, num_parts, out_step), _each(lse_infos, num_parts, lse_step), num_parts, None)


def _parts(name: str, x: Any, min_axes: int) -> tuple[list[ArrayInfo], int, int | None]:
    """Return the parts of an argument, their number and, if they are stacked, the first one alone and their stride."""
    axes = "..., Nq, Dv)" if min_axes == 2 else "..., Nq)"
    if isinstance(x, (list, tuple)):
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


def _merge_on_host(parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    out_result, lse_result = result_operands(parts)
    rows, computed = parts.lses[0].shape, DTYPES[parts.lses[0].dtype]
    out, lse = allocate(parts.outs[0].shape, out_result), allocate(rows, lse_result)
    lses = [info.array for info in parts.lses]
    largest = np.maximum.reduce(lses)

    def relative(part: np.ndarray) -> np.ndarray:
        """exp(part - largest), where infinities that are equal give 1."""
        return np.exp(np.where(part == largest, computed.type(0), part - largest))

    with np.errstate(all="ignore"):  # infinities and NaN are values here
        total = np.zeros(rows, computed)
        for part in lses:
            total += relative(part)
        lse[...] = largest + np.log(total)
        values = out if out.dtype == computed else np.empty_like(out, computed)
        values.fill(0)
        for info, part in zip(parts.outs, lses, strict=True):
            weight = relative(part) / total
            array, unseen = info.array.astype(computed, copy=False), np.isneginf(part)
            if unseen.any():
                array = np.where(unseen[..., np.newaxis], computed.type(0), array)
            values += weight[..., np.newaxis] * array
        if values is not out:
            out[...] = values
    return out, lse


def result_operands(parts: Parts) -> tuple[Operand, Operand]:
    """Layout of `out` and `lse`."""
    operands = []
    for info in (parts.outs[0], parts.lses[0]):
        strides = strides_like(info.shape, parts.outs[0].strides, ITEMSIZE[info.dtype])
        operands.append(Operand(info.dtype, strides, alignment_of(0, info.shape, strides)))
    return operands[0], operands[1]


def merge_workspace(parts: Parts) -> int:
    """Bytes of scratch memory: partial results of each `MAX_PARTS` arrays, if there are more."""
    if parts.strides is not None or parts.num_parts <= MAX_PARTS:
        return 0
    first = parts.outs[0]
    partial = partial_layout(first.shape[:-1], first.shape[-1], parts.lses[0].dtype)
    return -(-parts.num_parts // MAX_PARTS) * sum(partial.strides)


class Step(NamedTuple):
    """One combination with its addresses."""

    combination: Combination
    outs: list[int]
    lses: list[int]
    out: int
    lse: int


def merge_steps(parts: Parts, out: int, lse: int, workspace: int) -> list[Step]:
    """Combinations that merge parts, in their order, given the addresses of results and of scratch memory."""
    shape, dtype = parts.outs[0].shape, parts.lses[0].dtype
    rows, width = shape[:-1], shape[-1]
    out_result, lse_result = result_operands(parts)
    outs, lses = _operands(parts.outs), _operands(parts.lses)
    out_pointers, lse_pointers = ([info.pointer for info in infos] for infos in (parts.outs, parts.lses))
    if merge_workspace(parts) == 0:
        whole = combine_parts(rows, width, outs, lses, out_result, lse_result, parts.num_parts, parts.strides)
        return [Step(whole, out_pointers, lse_pointers, out, lse)]
    partial_out, partial_lse, (out_step, lse_step) = partial_layout(rows, width, dtype)
    num_groups = -(-parts.num_parts // MAX_PARTS)
    partial_lses = workspace + num_groups * out_step
    steps = []
    for group in range(num_groups):
        members = slice(group * MAX_PARTS, (group + 1) * MAX_PARTS)
        some = outs[members]
        combination = combine_parts(rows, width, some, lses[members], partial_out, partial_lse, len(some), None)
        to = workspace + group * out_step, partial_lses + group * lse_step
        steps.append(Step(combination, out_pointers[members], lse_pointers[members], *to))
    steps_apart = out_step, lse_step
    last = combine_parts(rows, width, [partial_out], [partial_lse], out_result, lse_result, num_groups, steps_apart)
    return [*steps, Step(last, [workspace], [partial_lses], out, lse)]


def _operands(infos: list[ArrayInfo]) -> list[Operand]:
    return [Operand(x.dtype, x.strides, alignment_of(x.pointer, x.shape, x.strides)) for x in infos]


def _merge_on_gpu(parts: Parts) -> tuple[Any, Any]:
    import cupy

    device_id, rows = parts.outs[0].device, parts.lses[0].shape
    out_result, lse_result = result_operands(parts)
    with cupy.cuda.Device(device_id):
        result = Result(parts.outs[0].shape, out_result)
        out, _workspace, address = allocate_with_workspace(cupy, result, None, merge_workspace(parts), None)
        lse = Result(rows, lse_result).allocate(cupy)
        steps = merge_steps(parts, out.data.ptr, lse.data.ptr, address)
        functions = [kernel_function(step.combination.build, device_id) for step in steps]
        for function, step in zip(functions, steps, strict=True):
            launch_combination(function, *step)
    return out, lse
