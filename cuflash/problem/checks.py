"""The checks behind `describe.py`: each takes an argument or a group, and raises with argument, got, expected."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from ..settings import FLOAT32_PRECISION
from .arrays import (
    DTYPE_NAMES,
    FLOAT_NAMES,
    HOST,
    INTEGER_NAMES,
    ITEMSIZE,
    MISSING,
    ArrayInfo,
    brief,
    computed_dtype,
    inspect,
    overlaps_itself,
    share_memory,
)
from .hints import axes_hint, dtype_hint, rows_hint

MAX_HEAD_DIM = 512
MOST_BITS = 4096
"""Of an int that an error can name."""
BOUNDARY = 16
"""Bytes; where partial results begin in a workspace."""
MAX_SCALE = {"float16": 1e30, "bfloat16": 1e30, "float32": 1e30, "float64": 1e300}
"""Far inside the range of the arithmetic, float32 or float64: what scores are multiplied with later must fit, too."""
MAX_HEADS_ON_GPU = 2**31 - 1
"""Kernels count query heads with an int."""
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38


def operands(**arrays: Any) -> dict[str, ArrayInfo]:
    """Check types of q, k and perhaps v, by their names."""
    infos = {name: inspect(name, x) for name, x in arrays.items()}
    q_info = infos["q"]
    for name, info in infos.items():
        if info.dtype not in FLOAT_NAMES:
            expected = f"float16, bfloat16, float32 or float64{dtype_hint(name, info.dtype)}"
            raise TypeError(f"{name} has dtype {info.dtype}, expected {expected}")
        if len(info.shape) < 2:
            expected = f"(..., heads, sequence, feature) or (sequence, feature){rows_hint(name, info.shape)}"
            raise ValueError(f"{name} has shape {info.shape}, expected {expected}")
        if info.device != q_info.device:
            same_device(name, info, "q", q_info)
        if info.dtype != q_info.dtype:
            raise TypeError(
                f"{name} has dtype {info.dtype} but q has {q_info.dtype}; "
                f"{'q, k and v' if 'v' in infos else 'q and k'} share one dtype, convert with .astype()"
            )
    return infos


def same_device(name: str, info: ArrayInfo, other_name: str, other: ArrayInfo) -> None:
    """Raise if two arrays of a call are on different devices."""
    if info.device == other.device:
        return
    if HOST in (info.device, other.device):
        got, expected = ("a NumPy array", "a GPU array") if info.device == HOST else ("a GPU array", "a NumPy array")
        hint = "move one with cupy.asarray(x) or cupy.asnumpy(x)"
        raise TypeError(f"{name} is {got} but {other_name} is {expected}; {hint}")
    raise ValueError(f"{name} is on GPU {info.device} but {other_name} is on GPU {other.device}")


def with_heads(info: ArrayInfo) -> ArrayInfo:
    """Read a 2-D array as one head."""
    if len(info.shape) != 2:
        return info
    return info._replace(shape=(1, *info.shape), strides=(0, *info.strides))


def check_features(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo | None = None) -> None:
    head_dim = q.shape[-1]
    if k.shape[-1] != head_dim:
        raise ValueError(f"k has head_dim {k.shape[-1]} but q has {head_dim}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"q has head_dim {head_dim}, expected 1 to {MAX_HEAD_DIM}")
    if v is not None and not 1 <= v.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"v has head_dim {v.shape[-1]}, expected 1 to {MAX_HEAD_DIM}")


def check_heads(
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int | None,
    device: int,
    seqlens: tuple[int, int] | None = None,
    keys: str = "k",
) -> None:
    """Raise a ValueError for heads that do not fit; the lengths tell whether heads and sequence may be confused.

    `num_heads_v` is None where there are no values, or they have been compared with the keys, whose name is `keys`.
    """
    if num_heads_q > MAX_HEADS_ON_GPU and device != HOST:
        raise ValueError(f"q has {num_heads_q} heads, expected at most {MAX_HEADS_ON_GPU} on a GPU")
    if num_heads_v not in (None, num_heads_k):
        raise ValueError(f"v has {num_heads_v} heads but k has {num_heads_k}")
    if num_heads_q % num_heads_k if num_heads_k else num_heads_q:
        hint = ""
        if seqlens is not None and 0 < seqlens[1] <= seqlens[0] < num_heads_q and seqlens[0] % seqlens[1] == 0:
            hint = "; if axes are (batch, sequence, heads, feature), pass x.swapaxes(-3, -2) of each"
        of = keys if num_heads_v is None else "k and v"
        raise ValueError(f"q has {num_heads_q} heads, expected a multiple of the {num_heads_k} heads of {of}{hint}")


def broadcast_batch(q: tuple[int, ...], *others: tuple[int, ...]) -> tuple[int, ...]:
    """Leading axes of q, k and perhaps v together, of which there may be more than `np.broadcast_shapes` takes."""
    batch = q
    for name, axes in zip("kv", others, strict=False):
        if axes == batch:
            continue
        pairs = list(zip_longest(reversed(batch), reversed(axes), fillvalue=1))
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise ValueError(f"{name} has leading axes {axes}, which do not broadcast with {batch}")
        batch = tuple(length if other == 1 else other for length, other in reversed(pairs))
    return batch


def optional_array(
    infos: dict[str, ArrayInfo],
    name: str,
    x: Any,
    dtypes: tuple[str, ...],
    target: tuple[int, ...],
    alternative: str = "",
    hint: str = "",
) -> None:
    """Check one option that is an array and broadcasts to `target`, and enter it in `infos`.

    Errors name an alternative to the dtypes, and end with a hint for shapes of which nothing else is known.
    """
    info = inspect(name, x)
    if info.dtype not in dtypes:
        wanted = {"bool": "bool (True = attend)", "float16": "a float dtype", "int8": "an integer dtype"}[dtypes[0]]
        raise TypeError(
            f"{name} has dtype {info.dtype}, expected {wanted}{' ' + alternative if alternative else ''}"
            f"{dtype_hint(name, info.dtype)}"
        )
    same_device(name, info, "q", infos["q"])
    shape = info.shape
    if len(shape) > len(target) or any(
        length not in (1, wanted) for length, wanted in zip(reversed(shape), reversed(target), strict=False)
    ):
        raise ValueError(
            f"{name} has shape {shape}, expected one that broadcasts to {target}"
            f"{axes_hint(name, shape, target) or hint}"
        )
    infos[name] = info


def parse_integer(name: str, x: Any, expected: str) -> int:
    if isinstance(x, (bool, np.bool_)) or str(getattr(x, "dtype", "")).endswith("bool"):  # torch's, too
        raise TypeError(f"{name} is {x} (bool), expected {expected}")
    try:
        value = operator.index(x)
    except TypeError:
        kind = "" if x is MISSING else f" ({type(x).__name__})"
        hint = "; pass np.asarray(x)" if isinstance(x, (list, tuple)) and "array" in expected else ""
        raise TypeError(f"{name} is {brief(x)}{kind}, expected {expected}{hint}") from None
    if value.bit_length() > MOST_BITS:
        raise ValueError(f"{name} is {brief(value)}, expected {expected}")
    return value


def parse_causal(causal: Any, query_offset: Any, bottom_right: int | None) -> tuple[int | None, int | None]:
    """Return the right edge of the window (0 or None) and the query offset (None: from an array or the lengths)."""
    if isinstance(causal, str):
        if causal not in ("bottom_right", "top_left"):
            raise ValueError(f"causal is {causal!r}, expected False, True, 'bottom_right' or 'top_left'")
        if query_offset is not None:
            raise ValueError(
                f"causal={causal!r} names a query offset, so query_offset must be None, got {brief(query_offset)}"
            )
        return 0, 0 if causal == "top_left" else bottom_right
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal is {brief(causal)}, expected False, True, 'bottom_right' or 'top_left'")
    right = 0 if causal else None
    if query_offset is None:
        return right, bottom_right
    if isinstance(query_offset, (int, np.generic)) or not hasattr(query_offset, "dtype"):
        expected = "an int, or an integer array that broadcasts to the leading axes"
        offset = parse_integer("query_offset", query_offset, expected)
        return right, clamp_offset(offset)
    return right, None


def clamp_offset(query_offset: int) -> int:
    """Return an offset that 64-bit sums with lengths can hold: farther ones hide the same keys, as if from there."""
    return max(-(2**60), min(2**60, query_offset))


def parse_window(window: Any, right: int | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, right
    expected = "(left, right) with non-negative ints, or None for an open side"
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window is {brief(window)}, expected {expected}")
    if len(window) != 2:
        raise ValueError(f"window has {len(window)} entries, expected {expected}")
    sides: list[int | None] = []
    for name, side in zip(("window[0] (left)", "window[1] (right)"), window, strict=True):
        value = None if side is None else parse_integer(name, side, "a non-negative int, or None for an open side")
        if value is not None and value < 0:
            raise ValueError(f"{name} is {brief(value)}, expected a non-negative int; None leaves that side open")
        sides.append(None if value is None else min(value, 2**61))
    left, window_right = sides
    return left, window_right if right is None else right


def hashable_window(window: Any) -> Any:
    """Return a key for `window` that tells (1, 2) from (True, 2) and (1.0, 2), which are equal but not both valid."""
    if type(window) in (tuple, list):
        return (*window, *map(type, window))
    return window, type(window)


def parse_flag(name: str, flag: Any) -> bool:
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name} is {brief(flag)}, expected True or False")
    return bool(flag)


def _real(name: str, x: Any, hint: str) -> float:
    is_number = isinstance(x, numbers.Real) or (isinstance(x, np.generic) and x.dtype in DTYPE_NAMES)
    if not is_number or isinstance(x, (bool, np.bool_, np.timedelta64)):
        is_array = getattr(x, "shape", None) == () and not isinstance(x, np.generic)
        more = "; pass float(x), which waits for a GPU" if is_array else ""
        raise TypeError(f"{name} is {brief(x)}, expected a finite real number{hint}{more}")
    try:
        value = float(x)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{name} is {brief(x)}, expected a finite real number{hint}")
    return value


def parse_scale(scale: Any, head_dim: int, dtype: str) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    value = _real("scale", scale, ", or None for head_dim ** -0.5")
    if abs(value) > MAX_SCALE[dtype]:
        raise ValueError(f"scale is {value}, expected at most {MAX_SCALE[dtype]:g} in magnitude for {dtype} arrays")
    return value


def parse_softcap(softcap: Any, dtype: str) -> float:
    if softcap is None:
        return 0.0
    value = _real("softcap", softcap, " above 0, or None for off")
    if value <= 0:
        raise ValueError(f"softcap is {value}, expected a number above 0; None turns it off")
    if dtype == "float64":
        return value
    # Beyond float32 the cap is the identity to the last bit, or indistinguishable from 0.
    return 0.0 if value > FLOAT32_MAX else max(value, FLOAT32_TINY)


def parse_precision(precision: Any, dtype: str) -> str:
    if precision is None:
        return FLOAT32_PRECISION if dtype == "float32" else "ieee"
    if not isinstance(precision, str) or precision not in ("ieee", "tf32"):
        raise ValueError(f"precision is {brief(precision)}, expected None, 'ieee' or 'tf32'")
    if precision == "tf32" and dtype != "float32":
        raise ValueError(f"precision='tf32' is for float32 arrays, but q has dtype {dtype}")
    return precision


def dtype_name(name: str, dtype: Any) -> str:
    try:
        # NumPy reads a number's dtype, but numbers of several dtypes are equal; and None as float64.
        found = None if dtype is None or isinstance(dtype, np.generic) else np.dtype(dtype)
        parsed = brief(dtype) if found is None else DTYPE_NAMES.get(found, str(found))
    except (TypeError, ValueError):
        parsed = brief(dtype)
    if parsed not in FLOAT_NAMES:
        raise TypeError(f"{name} is {parsed}, expected float16, bfloat16, float32 or float64")
    return parsed


def check_results(infos: dict[str, ArrayInfo], out: Any, lse: Any, out_dtype: Any, out_shape: tuple[int, ...]) -> str:
    """Check `out`, `lse` and `out_dtype`; return the element type of `out`."""
    dtype = infos["q"].dtype
    out_name = dtype if out_dtype is None else dtype_name("out_dtype", out_dtype)
    if out is None and lse is None:
        return out_name
    if out is not None:
        info = inspect("out", out)
        if out_dtype is None and info.dtype in FLOAT_NAMES:
            out_name = info.dtype
        if info.dtype != out_name:
            given = out_dtype is not None
            expected = f"{out_name} as out_dtype says" if given else "float16, bfloat16, float32 or float64"
            raise TypeError(f"out has dtype {info.dtype}, expected {expected}")
        check_result("out", info, out_shape, list(infos.items()))
        infos["out"] = info
    if lse is not None:
        check_lse(infos, "lse", lse, out_shape[:-1])
    return out_name


def check_lse(infos: dict[str, ArrayInfo], name: str, lse: Any, shape: tuple[int, ...]) -> None:
    """Check an array for the lse, which the call names `name`, and enter it in `infos`."""
    info, dtype = inspect(name, lse), infos["q"].dtype
    expected = computed_dtype(dtype)
    if info.dtype != expected:
        raise TypeError(f"{name} has dtype {info.dtype}, expected {expected} (q has {dtype})")
    check_result(name, info, shape, list(infos.items()))
    infos[name] = info


def check_result(name: str, info: ArrayInfo, shape: tuple[int, ...], others: Sequence[tuple[str, ArrayInfo]]) -> None:
    """Check that an array can be written, apart from the others of a call, which are named as the call names them."""
    if info.shape != shape:
        raise ValueError(f"{name} has shape {info.shape}, expected {shape}")
    same_device(name, info, *others[0])
    if not info.writeable:
        raise ValueError(f"{name} is read-only, expected a writeable array")
    check_written(name, info, others)


def check_written(name: str, info: ArrayInfo, others: Sequence[tuple[str, ArrayInfo]]) -> None:
    """Raise if elements of an array that is written overlap each other, or another array of the call."""
    if overlaps_itself(info.shape, info.strides, ITEMSIZE[info.dtype]):
        raise ValueError(
            f"{name} has strides {info.strides} for shape {info.shape}, so that its elements overlap each other"
        )
    check_apart(name, info, others)


def check_apart(name: str, info: ArrayInfo, others: Sequence[tuple[str, ArrayInfo]]) -> None:
    """Raise if a result shares memory with another array of the call."""
    if info.array is None:
        return
    for other_name, other in others:
        if other.array is not None and share_memory(info, other):
            raise ValueError(f"{name} overlaps {other_name} in memory, expected an array of its own")


def check_workspace(infos: dict[str, ArrayInfo], workspace: Any) -> None:
    info = inspect("workspace", workspace)
    if info.dtype != "uint8" or len(info.shape) != 1 or (info.shape[0] > 1 and info.strides[0] != 1):
        raise TypeError(
            f"workspace has dtype {info.dtype} and shape {info.shape}, expected a contiguous 1-D uint8 array"
        )
    check_result("workspace", info, info.shape, list(infos.items()))
    infos["workspace"] = info


def workspace_size(pointer: int, size: int) -> int:
    """Bytes of a workspace from the first boundary on."""
    return size - -pointer % BOUNDARY


def check_cu_seqlens(infos: dict[str, ArrayInfo], cu_seqlens: tuple[Any, Any], totals: tuple[int, int]) -> int:
    """Check the boundaries of packed queries and keys, of which there are `totals`; return how many boundaries."""
    for tokens, x, total in zip("qk", cu_seqlens, totals, strict=True):
        check_boundaries(infos, f"cu_seqlens_{tokens}", x, total, tokens)
    num_boundaries = infos["cu_seqlens_q"].shape[0]
    if infos["cu_seqlens_k"].shape[0] != num_boundaries:
        raise ValueError(
            f"cu_seqlens_k has {infos['cu_seqlens_k'].shape[0]} entries but cu_seqlens_q has {num_boundaries}; "
            "both need one per sequence and one more"
        )
    return num_boundaries


def check_boundaries(infos: dict[str, ArrayInfo], name: str, x: Any, total: int, tokens: str) -> None:
    """Check where packed sequences begin and end, with `total` tokens in the array `tokens`; enter it in `infos`."""
    info = inspect(name, x)
    if info.dtype not in INTEGER_NAMES:
        raise TypeError(f"{name} has dtype {info.dtype}, expected an integer dtype")
    if len(info.shape) != 1 or info.shape[0] < 1:
        raise ValueError(f"{name} has shape {info.shape}, expected (number of sequences + 1,)")
    same_device(name, info, "q", infos["q"])
    infos[name] = info
    if info.device != HOST or info.array is None:
        return
    values = info.array
    if values[0] != 0:
        raise ValueError(f"{name} begins with {values[0]}, expected 0")
    falls = np.flatnonzero(values[1:] < values[:-1])
    if falls.size:
        at = int(falls[0])
        raise ValueError(f"{name} falls from {values[at]} to {values[at + 1]} at entry {at + 1}, expected no decrease")
    if values[-1] > total:
        raise ValueError(f"{name} ends with {values[-1]} but {tokens} has {total} tokens")
