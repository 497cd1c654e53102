"""From a call to its `Problem`: arrays and options, checked once.

Every public function goes through a `describe_...` of its own. They raise for anything the contract
excludes - before a byte is allocated, launched or written.
"""

from __future__ import annotations

from typing import Any

from .arrays import FLOAT_NAMES, INTEGER_NAMES, ArrayInfo
from .checks import (
    broadcast_batch,
    check_cu_seqlens,
    check_features,
    check_heads,
    check_lse,
    check_results,
    check_workspace,
    operands,
    optional_array,
    parse_causal,
    parse_flag,
    parse_integer,
    parse_precision,
    parse_scale,
    parse_softcap,
    parse_window,
    with_heads,
)
from .kind import Kind
from .problem import (
    ARRAYS,
    HEAD_ARRAYS,
    PAIR_ARRAYS,
    Cache,
    Dtypes,
    Problem,
    Strides,
    Traits,
    dense_shapes,
    varlen_shapes,
)
from .signatures import Causal


def describe_attention(q: Any, k: Any, v: Any, **options: Any) -> tuple[Problem, dict[str, ArrayInfo]]:
    """Check a call of `attention`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    return _describe_dense("attention", operands(q=q, k=k, v=v), **options)


def describe_attention_lse(q: Any, k: Any, *, out: Any = None, **options: Any) -> tuple[Problem, dict[str, ArrayInfo]]:
    """Check a call of `attention_lse`; return its meaning and the arrays that it names, `out` as what it is: the lse.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    return _describe_dense("attention_lse", operands(q=q, k=k), lse=out, return_lse=True, **options)


def _describe_dense(op: str, infos: dict[str, ArrayInfo], **options: Any) -> tuple[Problem, dict[str, ArrayInfo]]:
    is_2d = all(len(info.shape) == 2 for info in infos.values())
    batch, heads, seqlens, head_dims = _dense_axes([with_heads(info) for info in infos.values()])
    shapes: dict[str, Any] = dict(zip(ARRAYS, dense_shapes(batch, heads, seqlens, head_dims), strict=True))
    offset = seqlens[1] - seqlens[0]
    return problem_with_options(op, infos, shapes, batch, heads, seqlens, offset, is_2d=is_2d, **options), infos


def _dense_axes(
    given: list[ArrayInfo],
) -> tuple[tuple[int, ...], tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Check the shapes of q, k and perhaps v; return leading axes, heads, lengths and head dimensions."""
    q, k, *values = given
    num_heads_q, seqlen_q, head_dim = q.shape[-3:]
    num_heads_kv, seqlen_k, _ = k.shape[-3:]
    head_dim_v, num_heads_v = (values[0].shape[-1], values[0].shape[-3]) if values else (0, None)
    check_features(*given)
    if values and values[0].shape[-2] != seqlen_k:
        raise ValueError(f"v has {values[0].shape[-2]} keys (axis -2) but k has {seqlen_k}")
    check_heads(num_heads_q, num_heads_kv, num_heads_v, q.device, (seqlen_q, seqlen_k))
    batch = broadcast_batch(*(info.shape[:-3] for info in given))
    return batch, (num_heads_q, num_heads_kv), (seqlen_q, seqlen_k), (head_dim, head_dim_v)


def describe_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    **options: Any,
) -> tuple[Problem, dict[str, ArrayInfo]]:
    """Check a call of `attention_varlen`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    infos = operands(q=q, k=k, v=v)
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
    found = varlen_shapes(batch, (num_heads_q, num_heads_kv), (total_q, total_k), (head_dim, head_dim_v))
    shapes: dict[str, Any] = dict(zip(ARRAYS, found, strict=True))
    heads, totals = (num_heads_q, num_heads_kv), (total_q, total_k)
    return problem_with_options("attention_varlen", infos, shapes, batch, heads, totals, None, **options), infos


def problem_with_options(
    op: str,
    infos: dict[str, ArrayInfo],
    shapes: dict[str, Any],
    batch: tuple[int, ...],
    heads: tuple[int, int],
    seqlens: tuple[int, int],
    bottom_right: int | None,
    cache: Cache | None = None,
    *,
    is_2d: bool = False,
    causal: Causal = False,
    window: Any = None,
    query_offset: Any = None,
    scale: Any = None,
    softcap: Any = None,
    precision: str | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    workspace: Any = None,
    **arrays: Any,
) -> Problem:
    """Check the options of a call; return the problem.

    `arrays` are those of `PAIR_ARRAYS` and `HEAD_ARRAYS` that the operation takes, by name, None where there is none.
    `shapes` are those of the arrays, `bottom_right` is the query offset if the last query stands at the last key, and
    None where lengths are not known. Arrays get the names that they have in a problem.
    """
    for name in (*PAIR_ARRAYS, *HEAD_ARRAYS):
        if arrays.get(name) is not None:
            optional_array(infos, name, arrays[name], ("bool",) if name == "mask" else FLOAT_NAMES, shapes[name])
    right, offset = parse_causal(causal, query_offset, bottom_right)
    if query_offset is not None and offset is None:
        optional_array(infos, "query_offset", query_offset, INTEGER_NAMES, batch, "or an int")
    window_left, window_right = parse_window(window, right)
    out_shape = shapes["out"][1:] if is_2d else shapes["out"]
    out_name = _check_results(op, infos, out_shape, out, lse, out_dtype, workspace)
    if cache is not None:
        caches = {name: infos.pop(f"{name}_cache") for name in "kv"}
        is_known = not cache.page_size and "seqlens_k" not in infos
        infos |= {name: first_keys(x, seqlens[1]) if is_known else x for name, x in caches.items()}
    strides = _strides_to_find(parse_flag("return_lse", return_lse) or lse is not None)
    scale = parse_scale(scale, infos["q"].shape[-1], infos["q"].dtype)
    like = Problem(
        traits=_traits(op, infos, out_name, (window_left, window_right), softcap, precision),
        batch=batch,
        num_heads_q=heads[0],
        num_heads_kv=heads[1],
        seqlen_q=seqlens[0],
        seqlen_k=seqlens[1],
        window_left=window_left,
        window_right=window_right,
        query_offset=offset,
        bottom_right=query_offset is None and causal != "top_left",
        scale=scale,
        strides=strides,
        dtypes=_dtypes(infos),
        is_2d=is_2d,
        cache=cache,
    )
    return _at(like, infos)


def _check_results(
    op: str,
    infos: dict[str, ArrayInfo],
    out_shape: tuple[int, ...],
    out: Any,
    lse: Any,
    out_dtype: Any,
    workspace: Any,
) -> str:
    """Check the arrays that are written; return the dtype of the output. The one of `attention_lse` is its lse."""
    is_lse = op == "attention_lse"
    if is_lse and lse is not None:
        check_lse(infos, "out", lse, out_shape[:-1])
    out_name = infos["q"].dtype if is_lse else check_results(infos, out, lse, out_dtype, out_shape)
    if workspace is not None:
        check_workspace(infos, workspace)
    if is_lse and "out" in infos:
        infos["lse"] = infos.pop("out")
    return out_name


def first_keys(info: ArrayInfo, length: int) -> ArrayInfo:
    """Read keys from the first one on, on axis -2 of four."""
    array = None if info.array is None else info.array[:, :, :length]
    return info._replace(array=array, shape=(*info.shape[:2], length, info.shape[3]))


def _at(like: Problem, infos: dict[str, ArrayInfo]) -> Problem:
    """Return the problem of a checked call, given all of it but what its kind finds."""
    given = [infos[name] for name in ARRAYS if name in infos]
    pointers = [infos[name].pointer if name in infos else 0 for name in ARRAYS]
    places = [place for place, name in enumerate(ARRAYS) if name in infos]
    shapes, strides = [info.shape for info in given], [info.strides for info in given]
    problem = Kind(like, places).at(shapes, strides, pointers, like.seqlen_k)
    assert problem is not None, "lengths are checked"
    return problem


def _strides_to_find(lse: bool) -> Strides:
    return Strides((), (), lse=() if lse else None)


def _dtypes(infos: dict[str, ArrayInfo]) -> Dtypes:
    return Dtypes(*(infos[name].dtype if name in infos else "" for name in Dtypes._fields))


def _traits(
    op: str,
    infos: dict[str, ArrayInfo],
    out_dtype: str,
    window: tuple[int | None, int | None],
    softcap: Any,
    precision: Any,
) -> Traits:
    """Read the traits, but for alignments."""
    dtype = infos["q"].dtype
    cap = parse_softcap(softcap, dtype)
    return Traits(
        op=op,
        dtype=dtype,
        out_dtype=out_dtype,
        precision=parse_precision(precision, dtype),
        head_dim=infos["q"].shape[-1],
        head_dim_v=infos["v"].shape[-1] if "v" in infos else 0,
        softcap=cap,
        window=window != (None, None),
        bias=infos["bias"].dtype if "bias" in infos else "",
        input_alignment=1,
        result_alignment=1,
        keys_are_tiles=True,
        **{name: name in infos for name in ("mask", *HEAD_ARRAYS, "query_offset", "seqlens_k", "page_table")},
    )
