"""From a call to its `Problem`: arrays and options, checked once.

Every public function goes through `describe_attention` or `describe_varlen`. They raise for anything the contract
excludes - before a byte is allocated, launched or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arrays import FLOAT_NAMES, INTEGER_NAMES, ITEMSIZE, ArrayInfo, strides_like
from .checks import (
    broadcast_batch,
    check_cu_seqlens,
    check_features,
    check_heads,
    check_results,
    check_workspace,
    optional_array,
    parse_causal,
    parse_flag,
    parse_integer,
    parse_precision,
    parse_scale,
    parse_softcap,
    parse_window,
    query_key_value,
    with_heads,
)
from .problem import Operand, Operands, Problem, Shapes, Traits, alignment_of, dense_shapes, varlen_shapes
from .types import Causal


def describe_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: Any = None,
    query_offset: Any = None,
    scale: Any = None,
    bias: Any = None,
    mask: Any = None,
    softcap: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    workspace: Any = None,
) -> tuple[Problem, dict[str, ArrayInfo]]:
    """Check a call of `attention`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    infos = query_key_value(q, k, v)
    q_info, k_info, v_info = infos["q"], infos["k"], infos["v"]
    is_2d = len(q_info.shape) == len(k_info.shape) == len(v_info.shape) == 2
    q_info, k_info, v_info = with_heads(q_info), with_heads(k_info), with_heads(v_info)
    num_heads_q, seqlen_q, head_dim = q_info.shape[-3:]
    num_heads_kv, seqlen_k, head_dim_v = v_info.shape[-3:]
    check_features(q_info, k_info, v_info)
    if k_info.shape[-2] != seqlen_k:
        raise ValueError(f"v has {seqlen_k} keys (axis -2) but k has {k_info.shape[-2]}")
    check_heads(num_heads_q, k_info.shape[-3], num_heads_kv, q_info.device, (seqlen_q, seqlen_k))
    batch = broadcast_batch(q_info.shape[:-3], k_info.shape[:-3], v_info.shape[:-3])

    shapes = dense_shapes(batch, (num_heads_q, num_heads_kv), (seqlen_q, seqlen_k), (head_dim, head_dim_v))
    if bias is not None:
        optional_array(infos, "bias", bias, FLOAT_NAMES, shapes["bias"])
    if mask is not None:
        optional_array(infos, "mask", mask, ("bool",), shapes["mask"])
    if alibi_slopes is not None:
        optional_array(infos, "alibi_slopes", alibi_slopes, FLOAT_NAMES, shapes["alibi_slopes"])
    if sinks is not None:
        optional_array(infos, "sinks", sinks, FLOAT_NAMES, shapes["sinks"])
    right, offset = parse_causal(causal, query_offset, seqlen_k - seqlen_q)
    if query_offset is not None and offset is None:
        optional_array(infos, "query_offset", query_offset, INTEGER_NAMES, batch, "or an int")
    window_left, window_right = parse_window(window, right)
    result_shape = shapes["out"][1:] if is_2d else shapes["out"]
    out_name = check_results(infos, out, lse, out_dtype, result_shape)
    if workspace is not None:
        check_workspace(infos, workspace)
    operands = _operands(infos, shapes, out_name, parse_flag("return_lse", return_lse) or lse is not None)
    scale = parse_scale(scale, head_dim, q_info.dtype)
    traits = _traits("attention", operands, head_dim, head_dim_v, (window_left, window_right), softcap, precision)
    problem = Problem(
        traits=traits,
        batch=batch,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        window_left=window_left,
        window_right=window_right,
        query_offset=offset,
        bottom_right=query_offset is None and causal != "top_left",
        scale=scale,
        operands=operands,
        is_2d=is_2d,
    )
    return problem, infos


def describe_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: Causal = False,
    window: Any = None,
    scale: Any = None,
    softcap: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: str | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
) -> tuple[Problem, dict[str, ArrayInfo]]:
    """Check a call of `attention_varlen`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    infos = query_key_value(q, k, v)
    q_info, k_info, v_info = infos["q"], infos["k"], infos["v"]
    for name in ("q", "k", "v"):
        if len(infos[name].shape) != 3:
            raise ValueError(f"{name} has shape {infos[name].shape}, expected (tokens, heads, feature)")
    total_q, num_heads_q, head_dim = q_info.shape
    total_k, num_heads_kv, head_dim_v = v_info.shape
    check_features(q_info, k_info, v_info)
    if k_info.shape[0] != total_k:
        raise ValueError(f"v has {total_k} tokens (axis 0) but k has {k_info.shape[0]}")
    check_heads(num_heads_q, k_info.shape[1], num_heads_kv, q_info.device)

    cu_seqlens = cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    num_boundaries = check_cu_seqlens(infos, cu_seqlens, (total_q, total_k))
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if hint is not None and parse_integer(name, hint, "a non-negative int or None") < 0:
            raise ValueError(f"{name} is {hint}, expected a non-negative int or None")

    batch = (num_boundaries - 1,)
    shapes = varlen_shapes(batch, (num_heads_q, num_heads_kv), (total_q, total_k), (head_dim, head_dim_v))
    if alibi_slopes is not None:
        optional_array(infos, "alibi_slopes", alibi_slopes, FLOAT_NAMES, shapes["alibi_slopes"])
    if sinks is not None:
        optional_array(infos, "sinks", sinks, FLOAT_NAMES, shapes["sinks"])
    right, offset = parse_causal(causal, None, None)
    window_left, window_right = parse_window(window, right)
    out_name = check_results(infos, out, lse, out_dtype, shapes["out"])
    operands = _operands(infos, shapes, out_name, parse_flag("return_lse", return_lse) or lse is not None)
    scale = parse_scale(scale, head_dim, q_info.dtype)
    traits = _traits(
        "attention_varlen", operands, head_dim, head_dim_v, (window_left, window_right), softcap, precision
    )
    problem = Problem(
        traits=traits,
        batch=batch,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        seqlen_q=total_q,
        seqlen_k=total_k,
        window_left=window_left,
        window_right=window_right,
        query_offset=offset,
        bottom_right=causal != "top_left",
        scale=scale,
        operands=operands,
        is_2d=False,
    )
    return problem, infos


def _operands(infos: dict[str, ArrayInfo], shapes: Shapes, out_dtype: str, lse: bool) -> Operands:
    """Describe the arrays of a call, broadcast to `shapes`, and the results that it does not name."""
    found = {name: _operand(info, shapes[name]) for name, info in infos.items() if name in shapes}
    q = found["q"]
    if "out" not in found:
        found["out"] = _new_result(out_dtype, shapes["out"], q)
    if lse and "lse" not in found:
        found["lse"] = _new_result("float64" if q.dtype == "float64" else "float32", shapes["lse"], q)
    return Operands(**found)


def _operand(info: ArrayInfo, target: tuple[int, ...]) -> Operand:
    shape, strides = info.shape, info.strides
    if shape != target:
        missing = len(target) - len(shape)
        strides = (0,) * missing + tuple(
            0 if length == 1 else stride for length, stride in zip(shape, strides, strict=True)
        )
    return Operand(info.dtype, strides, alignment_of(info.pointer, target, strides))


def _new_result(dtype: str, shape: tuple[int, ...], like: Operand) -> Operand:
    """Return the layout of a new array that lies in memory in the order of the query."""
    strides = strides_like(shape, like.strides, ITEMSIZE[dtype])
    # Address 0 stands for an allocation, which begins on a boundary of at least 16 bytes.
    return Operand(dtype, strides, alignment_of(0, shape, strides))


def _traits(
    op: str,
    operands: Operands,
    head_dim: int,
    head_dim_v: int,
    window: tuple[int | None, int | None],
    softcap: Any,
    precision: Any,
) -> Traits:
    q, k, v, out, lse, *others = operands
    dtype = q.dtype
    cap = parse_softcap(softcap, dtype)
    return Traits(
        op=op,
        dtype=dtype,
        out_dtype=out.dtype,
        precision=parse_precision(precision, dtype),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softcap=cap,
        window=window != (None, None),
        bias=operands.bias.dtype if operands.bias is not None else "",
        mask=operands.mask is not None,
        alibi_slopes=operands.alibi_slopes is not None,
        sinks=operands.sinks is not None,
        query_offset=operands.query_offset is not None,
        input_alignment=_common_alignment((q, k, v), others, head_dim | head_dim_v, ITEMSIZE[dtype]),
        result_alignment=_common_alignment((out,), (lse,), head_dim_v, ITEMSIZE[dtype]),
    )


def _common_alignment(moved: Sequence[Operand], others: Sequence[Operand | None], features: int, itemsize: int) -> int:
    """Return 16 if `moved` can move in 16-byte vectors, 1 if elements of any array lie on no boundary, else their size.

    `features` has the bits of the numbers of features, `itemsize` is that of the inputs.
    """
    common = 16 if features * itemsize % 16 == 0 else itemsize
    for operand in moved:
        dtype, strides, alignment = operand
        size = ITEMSIZE[dtype]
        if alignment < 16 or strides[-1] != size:
            if alignment % size or strides[-1] % size:
                return 1
            common = itemsize
    for other in others:
        if other is not None:
            dtype, strides, alignment = other
            size = ITEMSIZE[dtype]
            if alignment % size or (strides and strides[-1] % size):
                return 1
    return common
