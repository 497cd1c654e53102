"""What a call means: arrays and options checked once, then held as plain data.

Every public function goes through `describe_attention` or `describe_varlen`. They raise for anything the contract
excludes - before a byte is allocated, launched or written - and return a `Problem`: a hashable tuple without pointers,
from which the plan, the CPU back end and the printed explanation are made.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .arrays import (
    DTYPE_NAMES,
    FLOAT_NAMES,
    HOST,
    INTEGER_NAMES,
    ITEMSIZE,
    ArrayInfo,
    inspect,
    overlaps_itself,
    share_memory,
    strides_like,
)
from .knobs import FLOAT32_PRECISION

MAX_HEAD_DIM = 512
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38


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
    causal: bool | str = False,
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
    infos = _query_key_value(q, k, v)
    q_info, k_info, v_info = infos["q"], infos["k"], infos["v"]
    is_2d = len(q_info.shape) == len(k_info.shape) == len(v_info.shape) == 2
    q_info, k_info, v_info = _with_heads(q_info), _with_heads(k_info), _with_heads(v_info)
    num_heads_q, seqlen_q, head_dim = q_info.shape[-3:]
    num_heads_kv, seqlen_k, head_dim_v = v_info.shape[-3:]
    _check_features(q_info, k_info, v_info)
    if k_info.shape[-2] != seqlen_k:
        raise ValueError(f"v has {seqlen_k} keys (axis -2) but k has {k_info.shape[-2]}")
    _check_heads(num_heads_q, k_info.shape[-3], num_heads_kv)
    batch = _broadcast_batch(q_info.shape[:-3], k_info.shape[:-3], v_info.shape[:-3])

    heads = (*batch, num_heads_q)
    scores = (*heads, seqlen_q, seqlen_k)
    if bias is not None:
        _optional(infos, "bias", bias, FLOAT_NAMES, scores)
    if mask is not None:
        _optional(infos, "mask", mask, ("bool",), scores)
    if alibi_slopes is not None:
        _optional(infos, "alibi_slopes", alibi_slopes, FLOAT_NAMES, heads)
    if sinks is not None:
        _optional(infos, "sinks", sinks, FLOAT_NAMES, heads)
    right, offset = _causal(causal, query_offset, seqlen_k - seqlen_q)
    if query_offset is not None and offset is None:
        _optional(infos, "query_offset", query_offset, INTEGER_NAMES, batch, "or an int")
    window_left, window_right = _window(window, right)

    dtype = q_info.dtype
    out_shape = (*heads, seqlen_q, head_dim_v)
    out_name, lse_name = _results(infos, out, lse, out_dtype, out_shape[1:] if is_2d else out_shape)
    if workspace is not None:
        _workspace(infos, workspace)
    want_lse = bool(return_lse) or lse is not None
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
        _scale(scale, head_dim, dtype),
        _softcap(softcap, dtype),
        _precision(precision, dtype),
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
    causal: bool | str = False,
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
    infos = _query_key_value(q, k, v)
    q_info, k_info, v_info = infos["q"], infos["k"], infos["v"]
    for name in ("q", "k", "v"):
        if len(infos[name].shape) != 3:
            raise ValueError(f"{name} has shape {infos[name].shape}, expected (tokens, heads, feature)")
    total_q, num_heads_q, head_dim = q_info.shape
    total_k, num_heads_kv, head_dim_v = v_info.shape
    _check_features(q_info, k_info, v_info)
    if k_info.shape[0] != total_k:
        raise ValueError(f"v has {total_k} tokens (axis 0) but k has {k_info.shape[0]}")
    _check_heads(num_heads_q, k_info.shape[1], num_heads_kv)

    _cu_seqlens(infos, "cu_seqlens_q", cu_seqlens_q, total_q, "q")
    _cu_seqlens(infos, "cu_seqlens_k", cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, total_k, "k")
    num_boundaries = infos["cu_seqlens_q"].shape[0]
    if infos["cu_seqlens_k"].shape[0] != num_boundaries:
        raise ValueError(
            f"cu_seqlens_k has {infos['cu_seqlens_k'].shape[0]} entries but cu_seqlens_q has {num_boundaries}; "
            "both need one per sequence and one more"
        )
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if hint is not None and _integer(name, hint, "a non-negative int or None") < 0:
            raise ValueError(f"{name} is {hint}, expected a non-negative int or None")

    batch = (num_boundaries - 1,)
    heads = (*batch, num_heads_q)
    if alibi_slopes is not None:
        _optional(infos, "alibi_slopes", alibi_slopes, FLOAT_NAMES, heads)
    if sinks is not None:
        _optional(infos, "sinks", sinks, FLOAT_NAMES, heads)
    right, offset = _causal(causal, None, None)
    window_left, window_right = _window(window, right)
    dtype = q_info.dtype
    out_shape = (total_q, num_heads_q, head_dim_v)
    out_name, lse_name = _results(infos, out, lse, out_dtype, out_shape)
    want_lse = bool(return_lse) or lse is not None
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
        _scale(scale, head_dim, dtype),
        _softcap(softcap, dtype),
        _precision(precision, dtype),
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


def _query_key_value(q: Any, k: Any, v: Any) -> dict[str, ArrayInfo]:
    q_info = inspect("q", q)
    infos = {"q": q_info, "k": inspect("k", k), "v": inspect("v", v)}
    for name, info in infos.items():
        if info.dtype not in FLOAT_NAMES:
            raise TypeError(f"{name} has dtype {info.dtype}, expected float16, bfloat16, float32 or float64")
        if len(info.shape) < 2:
            raise ValueError(
                f"{name} has shape {info.shape}, expected (..., heads, sequence, feature) or (sequence, feature)"
            )
        if info.device != q_info.device:
            _same_device(name, info, q_info)
        if info.dtype != q_info.dtype:
            raise TypeError(
                f"{name} has dtype {info.dtype} but q has {q_info.dtype}; "
                "q, k and v share one dtype, convert with .astype()"
            )
    return infos


def _same_device(name: str, info: ArrayInfo, q_info: ArrayInfo) -> None:
    if info.device == q_info.device:
        return
    if HOST in (info.device, q_info.device):
        got, expected = ("a NumPy array", "a GPU array") if info.device == HOST else ("a GPU array", "a NumPy array")
        raise TypeError(f"{name} is {got} but q is {expected}; move one with cupy.asarray(x) or cupy.asnumpy(x)")
    raise ValueError(f"{name} is on GPU {info.device} but q is on GPU {q_info.device}")


def _with_heads(info: ArrayInfo) -> ArrayInfo:
    """Read a 2-D array as one head."""
    if len(info.shape) != 2:
        return info
    return info._replace(shape=(1, *info.shape), strides=(0, *info.strides))


def _check_features(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo) -> None:
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    if k.shape[-1] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[-1]} but q has {head_dim}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head_dim {head_dim}, expected 1 to {MAX_HEAD_DIM}")
    if not 1 <= head_dim_v <= MAX_HEAD_DIM:
        raise ValueError(f"v has head_dim {head_dim_v}, expected 1 to {MAX_HEAD_DIM}")


def _check_heads(num_heads_q: int, num_heads_k: int, num_heads_v: int) -> None:
    if num_heads_k != num_heads_v:
        raise ValueError(f"v has {num_heads_v} heads but k has {num_heads_k}")
    if num_heads_q % num_heads_v if num_heads_v else num_heads_q:
        raise ValueError(f"q has {num_heads_q} heads, expected a multiple of the {num_heads_v} heads of k and v")


def _broadcast_batch(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> tuple[int, ...]:
    if q == k == v:
        return q
    batch = q
    for name, axes in (("k", k), ("v", v)):
        try:
            batch = np.broadcast_shapes(batch, axes)
        except ValueError:
            raise ValueError(f"{name} has leading axes {axes}, which do not broadcast with {batch}") from None
    return batch


def _optional(
    infos: dict[str, ArrayInfo],
    name: str,
    x: Any,
    dtypes: tuple[str, ...],
    target: tuple[int, ...],
    alternative: str = "",
) -> None:
    """Check one option that is an array and broadcasts to `target`, and enter it in `infos`."""
    info = inspect(name, x)
    if info.dtype not in dtypes:
        wanted = {"bool": "bool (True = attend)", "float16": "a float dtype", "int8": "an integer dtype"}[dtypes[0]]
        raise TypeError(f"{name} has dtype {info.dtype}, expected {wanted}{' ' + alternative if alternative else ''}")
    _same_device(name, info, infos["q"])
    shape = info.shape
    if len(shape) > len(target) or any(
        length not in (1, wanted) for length, wanted in zip(reversed(shape), reversed(target), strict=False)
    ):
        raise ValueError(f"{name} has shape {shape}, expected one that broadcasts to {target}")
    infos[name] = info


def _integer(name: str, x: Any, expected: str) -> int:
    if isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} is {x} (bool), expected {expected}")
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"{name} is {x!r} ({type(x).__name__}), expected {expected}") from None


def _causal(causal: Any, query_offset: Any, bottom_right: int | None) -> tuple[int | None, int | None]:
    """Return the right edge of the window (0 or None) and the query offset (None: from an array or the lengths)."""
    if isinstance(causal, str):
        if causal not in ("bottom_right", "top_left"):
            raise ValueError(f"causal is {causal!r}, expected False, True, 'bottom_right' or 'top_left'")
        if query_offset is not None:
            raise ValueError(
                f"causal={causal!r} names a query offset, so query_offset must be None, got {_brief(query_offset)}"
            )
        return 0, 0 if causal == "top_left" else bottom_right
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal is {_brief(causal)}, expected False, True, 'bottom_right' or 'top_left'")
    right = 0 if causal else None
    if query_offset is None:
        return right, bottom_right
    if isinstance(query_offset, (int, np.generic)) or not hasattr(query_offset, "dtype"):
        expected = "an int, or an integer array that broadcasts to the leading axes"
        offset = _integer("query_offset", query_offset, expected)
        return right, max(-(2**61), min(2**61, offset))
    return right, None


def _brief(x: Any) -> str:
    if isinstance(x, (bool, int, float, complex, str, np.generic)):
        return f"{x!r}"
    return f"a {type(x).__name__}" + (f" of shape {tuple(x.shape)}" if hasattr(x, "shape") else "")


def _window(window: Any, right: int | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, right
    expected = "(left, right) with non-negative ints, or None for an open side"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window is {_brief(window)}, expected {expected}")
    if len(window) != 2:
        raise ValueError(f"window has {len(window)} entries, expected {expected}")
    sides: list[int | None] = []
    for name, side in zip(("window[0] (left)", "window[1] (right)"), window, strict=True):
        value = None if side is None else _integer(name, side, "a non-negative int, or None for an open side")
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}, expected a non-negative int; None leaves that side open")
        sides.append(None if value is None else min(value, 2**61))
    left, window_right = sides
    return left, window_right if right is None else right


def _real(name: str, x: Any, hint: str) -> float:
    is_number = isinstance(x, numbers.Real) or (isinstance(x, np.generic) and x.dtype in DTYPE_NAMES)
    if not is_number or isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} is {_brief(x)}, expected a finite real number{hint}")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name} is {_brief(x)}, expected a finite real number{hint}")
    return value


def _scale(scale: Any, head_dim: int, dtype: str) -> float:
    if scale is None:
        return head_dim**-0.5
    value = _real("scale", scale, ", or None for head_dim ** -0.5")
    if dtype != "float64" and abs(value) > FLOAT32_MAX:
        raise ValueError(f"scale is {value}, expected a number that float32, in which scores are computed, can hold")
    return value


def _softcap(softcap: Any, dtype: str) -> float:
    if softcap is None:
        return 0.0
    value = _real("softcap", softcap, " above 0, or None for off")
    if value <= 0:
        raise ValueError(f"softcap is {value}, expected a number above 0; None turns it off")
    if dtype == "float64":
        return value
    # Beyond float32 the cap is the identity to the last bit, or indistinguishable from 0.
    return 0.0 if value > FLOAT32_MAX else max(value, FLOAT32_TINY)


def _precision(precision: Any, dtype: str) -> str:
    if precision is None:
        return FLOAT32_PRECISION if dtype == "float32" else "ieee"
    if not isinstance(precision, str) or precision not in ("ieee", "tf32"):
        raise ValueError(f"precision is {_brief(precision)}, expected None, 'ieee' or 'tf32'")
    if precision == "tf32" and dtype != "float32":
        raise ValueError(f"precision='tf32' is for float32 arrays, but q has dtype {dtype}")
    return precision


def _dtype_name(name: str, dtype: Any) -> str:
    try:
        parsed = DTYPE_NAMES.get(np.dtype(dtype), str(np.dtype(dtype)))
    except (TypeError, ValueError):
        parsed = _brief(dtype)
    if parsed not in FLOAT_NAMES:
        raise TypeError(f"{name} is {parsed}, expected float16, bfloat16, float32 or float64")
    return parsed


def _results(
    infos: dict[str, ArrayInfo], out: Any, lse: Any, out_dtype: Any, out_shape: tuple[int, ...]
) -> tuple[str, str]:
    """Check `out`, `lse` and `out_dtype`; return the element types of the results."""
    dtype = infos["q"].dtype
    lse_name = "float64" if dtype == "float64" else "float32"
    out_name = dtype if out_dtype is None else _dtype_name("out_dtype", out_dtype)
    if out is None and lse is None:
        return out_name, lse_name
    inputs = list(infos.items())
    if out is not None:
        info = inspect("out", out)
        if out_dtype is None and info.dtype in FLOAT_NAMES:
            out_name = info.dtype
        if info.dtype != out_name:
            given = out_dtype is not None
            expected = f"{out_name} as out_dtype says" if given else "float16, bfloat16, float32 or float64"
            raise TypeError(f"out has dtype {info.dtype}, expected {expected}")
        _check_result("out", info, out_shape, inputs)
        infos["out"] = info
        inputs.append(("out", info))
    if lse is not None:
        info = inspect("lse", lse)
        if info.dtype != lse_name:
            raise TypeError(f"lse has dtype {info.dtype}, expected {lse_name} (q has {dtype})")
        _check_result("lse", info, out_shape[:-1], inputs)
        infos["lse"] = info
    return out_name, lse_name


def _check_result(name: str, info: ArrayInfo, shape: tuple[int, ...], others: Sequence[tuple[str, ArrayInfo]]) -> None:
    if info.shape != shape:
        raise ValueError(f"{name} has shape {info.shape}, expected {shape}")
    _same_device(name, info, others[0][1])
    if not info.writeable:
        raise ValueError(f"{name} is read-only, expected a writeable array")
    if overlaps_itself(info):
        raise ValueError(
            f"{name} has strides {info.strides} for shape {info.shape}, so that its elements overlap each other"
        )
    check_overlap(name, info, others)


def check_overlap(name: str, info: ArrayInfo, others: Sequence[tuple[str, ArrayInfo]]) -> None:
    """Raise if a result shares memory with another array of the call."""
    if info.array is None:
        return
    for other_name, other in others:
        if other.array is not None and share_memory(info, other):
            raise ValueError(f"{name} overlaps {other_name} in memory, expected an array of its own")


def _workspace(infos: dict[str, ArrayInfo], workspace: Any) -> None:
    info = inspect("workspace", workspace)
    if info.dtype != "uint8" or len(info.shape) != 1 or (info.shape[0] > 1 and info.strides[0] != 1):
        raise TypeError(
            f"workspace has dtype {info.dtype} and shape {info.shape}, expected a contiguous 1-D uint8 array"
        )
    _check_result("workspace", info, info.shape, list(infos.items()))
    infos["workspace"] = info


def _cu_seqlens(infos: dict[str, ArrayInfo], name: str, x: Any, total: int, tokens: str) -> None:
    info = inspect(name, x)
    if info.dtype not in INTEGER_NAMES:
        raise TypeError(f"{name} has dtype {info.dtype}, expected an integer dtype")
    if len(info.shape) != 1 or info.shape[0] < 1:
        raise ValueError(f"{name} has shape {info.shape}, expected (number of sequences + 1,)")
    _same_device(name, info, infos["q"])
    infos[name] = info
    if info.device != HOST or info.array is None:
        return
    values = [int(value) for value in info.array]
    if values[0] != 0:
        raise ValueError(f"{name} begins with {values[0]}, expected 0")
    for index in range(1, len(values)):
        if values[index] < values[index - 1]:
            raise ValueError(
                f"{name} falls from {values[index - 1]} to {values[index]} at entry {index}, expected no decrease"
            )
    if values[-1] > total:
        raise ValueError(f"{name} ends with {values[-1]} but {tokens} has {total} tokens")


def _operand(info: ArrayInfo, target: tuple[int, ...]) -> Operand:
    shape, strides = info.shape, info.strides
    if shape != target:
        missing = len(target) - len(shape)
        strides = (0,) * missing + tuple(
            0 if length == 1 else stride for length, stride in zip(shape, strides, strict=True)
        )
    return Operand(info.dtype, strides, _alignment(info.pointer, target, strides))


def _alignment(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
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
        return _operand(_with_heads(given) if name == "out" else given, shape)
    strides = strides_like(shape, like.strides, ITEMSIZE[dtype])
    # Address 0 stands for an allocation, which begins on a boundary of at least 16 bytes.
    return Operand(dtype, strides, _alignment(0, shape, strides))


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
