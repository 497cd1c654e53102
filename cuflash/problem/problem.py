"""What a call means: arrays and options checked once, then held as plain data.

Every public function goes through `describe_attention` or `describe_varlen`. They raise for anything the contract
excludes - before a byte is allocated, launched or written - and return a `Problem`: a hashable tuple without pointers,
from which the plan, the CPU back end and the printed explanation are made. What of it a compiled kernel may depend on
are its `Traits`; lengths and strides stand beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Operands(NamedTuple):
    """The arrays of a call by the names of its arguments, which are those of the kernels' addresses, too."""

    q: Operand
    k: Operand
    v: Operand
    out: Operand
    lse: Operand | None = None
    bias: Operand | None = None
    mask: Operand | None = None
    alibi_slopes: Operand | None = None
    sinks: Operand | None = None
    query_offset: Operand | None = None
    """Where it is an array."""
    cu_seqlens_q: Operand | None = None
    cu_seqlens_k: Operand | None = None


class Traits(NamedTuple):
    """All that a build may depend on: no length, no stride, and of the values only the cap."""

    op: str
    """`"attention"` or `"attention_varlen"`."""
    dtype: str
    out_dtype: str
    precision: str
    head_dim: int
    head_dim_v: int
    softcap: float
    """0.0 when off."""
    window: bool
    """Whether positions hide keys, as `causal` does, too."""
    bias: str
    """Its element type, "" when there is none."""
    mask: bool
    alibi_slopes: bool
    sinks: bool
    query_offset: bool
    """Whether it is an array."""
    input_alignment: int
    """16 if q, k and v can move in 16-byte vectors, 1 if an element of any input lies on no boundary, else its size."""
    result_alignment: int
    """The same of what is written."""

    @property
    def num_arrays(self) -> int:
        """Arrays that are read for every logit."""
        return (self.bias != "") + self.mask

    @property
    def num_terms(self) -> int:
        """What else makes a logit of a score."""
        return (self.softcap != 0) + self.alibi_slopes

    @property
    def alignment(self) -> int:
        """Of all arrays."""
        return min(self.input_alignment, self.result_alignment)

    @property
    def lse_dtype(self) -> str:
        """Type of the computation, of the lse and of partial results."""
        return "float64" if self.dtype == "float64" else "float32"


class Problem(NamedTuple):
    """Everything about a call that decides its result, except the values in the arrays."""

    traits: Traits
    batch: tuple[int, ...]
    """Broadcast leading axes; for packed sequences `(number of sequences,)`."""
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    """Queries per head; for packed sequences the total over all sequences."""
    seqlen_k: int
    window_left: int | None
    """Key j is visible only if j >= p - window_left (None: open). p is the query's key position."""
    window_right: int | None
    """Key j is visible only if j <= p + window_right (None: open). `causal` is already folded in here."""
    query_offset: int | None
    """Key position of query 0. None: that of the array, or (packed sequences) Nk - Nq of each sequence."""
    bottom_right: bool
    """The offset is Nk - Nq because nothing else was asked for, so it follows the lengths."""
    scale: float
    operands: Operands
    is_2d: bool
    """q, k and v were 2-D, so the results have no head axis."""

    def __str__(self) -> str:
        return describe_in_words(self)


HEAD_ARRAYS = ("alibi_slopes", "sinks")
"""Arguments with a value for each query head."""

Shapes = dict[str, tuple[int, ...]]


def dense_shapes(
    batch: tuple[int, ...], heads: tuple[int, int], seqlens: tuple[int, int], head_dims: tuple[int, int]
) -> Shapes:
    """Shapes to which the arrays of a dense call broadcast; each pair is of the queries and of the keys."""
    of_heads = (*batch, heads[0])
    of_keys = (*batch, heads[1], seqlens[1])
    lse = (*of_heads, seqlens[0])
    scores = (*lse, seqlens[1])
    return {
        "q": (*lse, head_dims[0]),
        "k": (*of_keys, head_dims[0]),
        "v": (*of_keys, head_dims[1]),
        "out": (*lse, head_dims[1]),
        "lse": lse,
        "bias": scores,
        "mask": scores,
        "alibi_slopes": of_heads,
        "sinks": of_heads,
        "query_offset": batch,
    }


def varlen_shapes(
    batch: tuple[int, ...], heads: tuple[int, int], totals: tuple[int, int], head_dims: tuple[int, int]
) -> Shapes:
    """Shapes to which the arrays of a call with packed sequences broadcast."""
    boundaries = (batch[0] + 1,)
    return {
        "q": (totals[0], heads[0], head_dims[0]),
        "k": (totals[1], heads[1], head_dims[0]),
        "v": (totals[1], heads[1], head_dims[1]),
        "out": (totals[0], heads[0], head_dims[1]),
        "lse": (totals[0], heads[0]),
        "alibi_slopes": (*batch, heads[0]),
        "sinks": (*batch, heads[0]),
        "cu_seqlens_q": boundaries,
        "cu_seqlens_k": boundaries,
    }


def shapes_of(problem: Problem) -> Shapes:
    """Shapes to which the arrays of a problem broadcast."""
    p, traits = problem, problem.traits
    find = varlen_shapes if traits.op == "attention_varlen" else dense_shapes
    heads, seqlens = (p.num_heads_q, p.num_heads_kv), (p.seqlen_q, p.seqlen_k)
    return find(p.batch, heads, seqlens, (traits.head_dim, traits.head_dim_v))


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


def result_rows(problem: Problem) -> tuple[int, ...]:
    """Shape of the lse, which is that of the output without its features."""
    if problem.traits.op == "attention_varlen":
        return problem.seqlen_q, problem.num_heads_q
    if problem.is_2d:
        return (problem.seqlen_q,)
    return *problem.batch, problem.num_heads_q, problem.seqlen_q


def describe_in_words(problem: Problem) -> str:
    """One line that says what is computed."""
    p, traits = problem, problem.traits
    axes = "x".join(map(str, p.batch)) or "1"
    parts = [
        f"{traits.op} {traits.dtype}" + (f"->{traits.out_dtype}" if traits.out_dtype != traits.dtype else ""),
        f"batch {axes}, heads {p.num_heads_q}/{p.num_heads_kv}, {p.seqlen_q} x {p.seqlen_k}",
        f"head_dim {traits.head_dim}" + (f"/{traits.head_dim_v}" if traits.head_dim_v != traits.head_dim else ""),
    ]
    if traits.window:
        parts.append(f"window ({p.window_left}, {p.window_right})")
    parts += [name for name in _NAMED if getattr(p.operands, name) is not None]
    if traits.softcap:
        parts.append(f"softcap {traits.softcap:g}")
    return ", ".join(parts)


_NAMED = ("bias", "mask", *HEAD_ARRAYS, "lse")
