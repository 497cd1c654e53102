"""What a call means: arrays and options checked once, then held as plain data.

Every public function goes through `describe_attention` or `describe_varlen`. They raise for anything the contract
excludes - before a byte is allocated, launched or written - and return a `Problem`: a hashable tuple without pointers,
from which the plan, the CPU back end and the printed explanation are made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from .types import Causal


class Operand(NamedTuple):
    """One array as the kernels see it: broadcast to the problem's axes, strides in bytes, no address."""

    dtype: str
    """NumPy name of the element type."""
    strides: tuple[int, ...]
    """Bytes from element to element, one per broadcast axis (0 where the array is repeated)."""
    alignment: int
    """Largest power of two up to 16 that divides the address and every stride but the last."""


class Problem(NamedTuple):
    """Everything about a call that decides its result, except the values in the arrays."""

    op: str
    """`"attention"` or `"attention_varlen"`."""
    dtype: str
    out_dtype: str
    lse_dtype: str
    batch: tuple[int, ...]
    """Broadcast leading axes; for packed sequences `(number of sequences,)`."""
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    """Queries per head; for packed sequences the total over all sequences."""
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    window_left: int | None
    """Key j is visible only if j >= p - window_left (None: open). p is the query's key position."""
    window_right: int | None
    """Key j is visible only if j <= p + window_right (None: open). `causal` is already folded in here."""
    query_offset: int | None
    """Key position of query 0. None: the `query_offset` operand, or (packed sequences) Nk - Nq of each sequence."""
    bottom_right: bool
    """The offset is Nk - Nq because nothing else was asked for, so it follows the lengths."""
    scale: float
    softcap: float
    """0.0 when off."""
    precision: str
    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: Operand | None
    bias: Operand | None
    mask: Operand | None
    alibi_slopes: Operand | None
    sinks: Operand | None
    query_offsets: Operand | None
    cu_seqlens_q: Operand | None
    cu_seqlens_k: Operand | None
    is_2d: bool
    """q, k and v were 2-D, so the results have no head axis."""

    @property
    def operands(self) -> tuple[Operand | None, ...]:
        """q, k, v, out, lse, bias, mask, alibi_slopes, sinks, query_offsets, cu_seqlens_q, cu_seqlens_k."""
        return self[_OPERANDS]  # type: ignore[return-value]

    def __str__(self) -> str:
        return describe_in_words(self)


_OPERANDS = slice(Problem._fields.index("q"), Problem._fields.index("cu_seqlens_k") + 1)


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

    heads = (*batch, num_heads_q)
    scores = (*heads, seqlen_q, seqlen_k)
    if bias is not None:
        optional_array(infos, "bias", bias, FLOAT_NAMES, scores)
    if mask is not None:
        optional_array(infos, "mask", mask, ("bool",), scores)
    if alibi_slopes is not None:
        optional_array(infos, "alibi_slopes", alibi_slopes, FLOAT_NAMES, heads)
    if sinks is not None:
        optional_array(infos, "sinks", sinks, FLOAT_NAMES, heads)
    right, offset = parse_causal(causal, query_offset, seqlen_k - seqlen_q)
    if query_offset is not None and offset is None:
        optional_array(infos, "query_offset", query_offset, INTEGER_NAMES, batch, "or an int")
    window_left, window_right = parse_window(window, right)

    dtype = q_info.dtype
    out_shape = (*heads, seqlen_q, head_dim_v)
    out_name, lse_name = check_results(infos, out, lse, out_dtype, out_shape[1:] if is_2d else out_shape)
    if workspace is not None:
        check_workspace(infos, workspace)
    want_lse = parse_flag("return_lse", return_lse) or lse is not None
    q_operand = _operand(q_info, (*heads, seqlen_q, head_dim))
    problem = Problem(
        "attention",
        dtype,
        out_name,
        lse_name,
        batch,
        num_heads_q,
        num_heads_kv,
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        window_left,
        window_right,
        offset,
        query_offset is None and causal != "top_left",
        parse_scale(scale, head_dim, dtype),
        parse_softcap(softcap, dtype),
        parse_precision(precision, dtype),
        q_operand,
        _operand(k_info, (*batch, num_heads_kv, seqlen_k, head_dim)),
        _operand(v_info, (*batch, num_heads_kv, seqlen_k, head_dim_v)),
        _result_operand(infos, "out", out_name, out_shape, q_operand),
        _result_operand(infos, "lse", lse_name, out_shape[:-1], q_operand) if want_lse else None,
        _operand(infos["bias"], scores) if bias is not None else None,
        _operand(infos["mask"], scores) if mask is not None else None,
        _operand(infos["alibi_slopes"], heads) if alibi_slopes is not None else None,
        _operand(infos["sinks"], heads) if sinks is not None else None,
        _operand(infos["query_offset"], batch) if "query_offset" in infos else None,
        None,
        None,
        is_2d,
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

    check_cu_seqlens(infos, "cu_seqlens_q", cu_seqlens_q, total_q, "q")
    check_cu_seqlens(infos, "cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, total_k, "k")
    num_boundaries = infos["cu_seqlens_q"].shape[0]
    if infos["cu_seqlens_k"].shape[0] != num_boundaries:
        raise ValueError(
            f"cu_seqlens_k has {infos['cu_seqlens_k'].shape[0]} entries but cu_seqlens_q has {num_boundaries}; "
            "both need one per sequence and one more"
        )
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if hint is not None and parse_integer(name, hint, "a non-negative int or None") < 0:
            raise ValueError(f"{name} is {hint}, expected a non-negative int or None")

    batch = (num_boundaries - 1,)
    heads = (*batch, num_heads_q)
    if alibi_slopes is not None:
        optional_array(infos, "alibi_slopes", alibi_slopes, FLOAT_NAMES, heads)
    if sinks is not None:
        optional_array(infos, "sinks", sinks, FLOAT_NAMES, heads)
    right, offset = parse_causal(causal, None, None)
    window_left, window_right = parse_window(window, right)
    dtype = q_info.dtype
    out_shape = (total_q, num_heads_q, head_dim_v)
    out_name, lse_name = check_results(infos, out, lse, out_dtype, out_shape)
    want_lse = parse_flag("return_lse", return_lse) or lse is not None
    q_operand = _operand(q_info, q_info.shape)
    problem = Problem(
        "attention_varlen",
        dtype,
        out_name,
        lse_name,
        batch,
        num_heads_q,
        num_heads_kv,
        total_q,
        total_k,
        head_dim,
        head_dim_v,
        window_left,
        window_right,
        offset,
        causal != "top_left",
        parse_scale(scale, head_dim, dtype),
        parse_softcap(softcap, dtype),
        parse_precision(precision, dtype),
        q_operand,
        _operand(k_info, k_info.shape),
        _operand(v_info, v_info.shape),
        _result_operand(infos, "out", out_name, out_shape, q_operand),
        _result_operand(infos, "lse", lse_name, out_shape[:-1], q_operand) if want_lse else None,
        None,
        None,
        _operand(infos["alibi_slopes"], heads) if alibi_slopes is not None else None,
        _operand(infos["sinks"], heads) if sinks is not None else None,
        None,
        _operand(infos["cu_seqlens_q"], (num_boundaries,)),
        _operand(infos["cu_seqlens_k"], (num_boundaries,)),
        False,
    )
    return problem, infos


def _operand(info: ArrayInfo, target: tuple[int, ...]) -> Operand:
    shape, strides = info.shape, info.strides
    if shape != target:
        missing = len(target) - len(shape)
        strides = (0,) * missing + tuple(
            0 if length == 1 else stride for length, stride in zip(shape, strides, strict=True)
        )
    return Operand(info.dtype, strides, alignment_of(info.pointer, target, strides))


def alignment_of(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the largest power of two up to 16 that divides the address and every stride but the last."""
    bits = pointer | 16
    for stride in strides[:-1]:
        bits |= stride
    if bits & 15:  # strides of axes with one element say nothing
        bits = pointer | 16
        for length, stride in zip(shape[:-1], strides, strict=False):
            if length > 1:
                bits |= stride
    return bits & -bits


def _result_operand(
    infos: dict[str, ArrayInfo], name: str, dtype: str, shape: tuple[int, ...], like: Operand
) -> Operand:
    """Return the layout of a result: the caller's array, or a new one that lies in memory in the order of the query."""
    if name in infos:
        given = infos[name]
        return _operand(with_heads(given) if name == "out" else given, shape)
    strides = strides_like(shape, like.strides, ITEMSIZE[dtype])
    # Address 0 stands for an allocation, which begins on a boundary of at least 16 bytes.
    return Operand(dtype, strides, alignment_of(0, shape, strides))


def common_alignment(problem: Problem) -> int:
    """Return 16 if q, k, v and out can move in 16-byte vectors, 1 if an element lies on no boundary, else its size."""
    vectors = True
    for operand in problem.operands:
        if operand is not None:
            itemsize = ITEMSIZE[operand.dtype]
            strides = operand.strides
            if operand.alignment % itemsize or (strides and strides[-1] % itemsize):
                return 1
            if operand.alignment < 16 or (strides and strides[-1] != itemsize):
                vectors = vectors and operand not in (problem.q, problem.k, problem.v, problem.out)
    itemsize = ITEMSIZE[problem.dtype]
    whole = problem.head_dim * itemsize % 16 == 0 and problem.head_dim_v * itemsize % 16 == 0
    return 16 if vectors and whole else itemsize


def result_rows(problem: Problem) -> tuple[int, ...]:
    """Shape of the lse, which is that of the output without its features."""
    if problem.op == "attention_varlen":
        return problem.seqlen_q, problem.num_heads_q
    if problem.is_2d:
        return (problem.seqlen_q,)
    return *problem.batch, problem.num_heads_q, problem.seqlen_q


def describe_in_words(problem: Problem) -> str:
    """One line that says what is computed."""
    p = problem
    axes = "x".join(map(str, p.batch)) or "1"
    parts = [
        f"{p.op} {p.dtype}" + (f"->{p.out_dtype}" if p.out_dtype != p.dtype else ""),
        f"batch {axes}, heads {p.num_heads_q}/{p.num_heads_kv}, {p.seqlen_q} x {p.seqlen_k}",
        f"head_dim {p.head_dim}" + (f"/{p.head_dim_v}" if p.head_dim_v != p.head_dim else ""),
    ]
    if p.window_left is not None or p.window_right is not None:
        parts.append(f"window ({p.window_left}, {p.window_right})")
    parts += [name for name in ("bias", "mask", "alibi_slopes", "sinks", "lse") if getattr(p, name) is not None]
    if p.softcap:
        parts.append(f"softcap {p.softcap:g}")
    return ", ".join(parts)
