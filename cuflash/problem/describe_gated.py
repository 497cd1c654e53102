"""From a call of the gated delta rule to its `GatedProblem`: arrays and options, checked once.

Beside `describe.py`, and like it: what the contract excludes is refused before a byte is allocated, launched or
written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import (
    FLOAT_NAMES,
    HOST,
    ITEMSIZE,
    MISSING,
    ArrayInfo,
    brief,
    computed_dtype,
    contiguous_strides,
    inspect,
    refuse,
    strides_like,
)
from .checks import (
    MAX_HEADS_ON_GPU,
    check_boundaries,
    check_result,
    parse_flag,
    parse_integer,
    parse_scale,
    same_device,
)
from .gated import GATED_ARRAYS, GatedProblem, GatedStrides, GatedTraits
from .problem import alignment_of

CHUNK_SIZES = (16, 32, 64, 128)
MAX_GATED_HEAD_DIM = 256
_PACKED_AXES = "(tokens, heads, feature)"
_AXES = "(batch, tokens, heads, feature)"
_FIELDS = {"v_new": "v", "log_g_cumsum": "log_g", "h": "states"}
"""Names of a problem's arrays, where the arguments of `chunk_gated_output` have other ones."""
_VECTORS = ("q", "k", "v", "states", "initial_state", "out", "final_state")
"""Arrays that kernels may move in vectors."""
_STATES = ("states", "initial_state", "final_state")


def describe_chunk_gated_output(
    q: Any,
    k: Any,
    v_new: Any,
    h: Any,
    log_g_cumsum: Any,
    cu_seqlens: Any,
    *,
    scale: Any = None,
    chunk_size: Any = 64,
    out: Any = None,
) -> tuple[GatedProblem, dict[str, ArrayInfo]]:
    """Check a call of `chunk_gated_output`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    given = _operands(_PACKED_AXES, q=q, k=k, v_new=v_new)
    total, num_heads_v, head_dim_v = given["v_new"].shape
    head_dim = given["q"].shape[-1]
    rows = _state(given, "h", h, ("number of chunks", num_heads_v, head_dim, head_dim_v), FLOAT_NAMES)
    _per_token(given, "log_g_cumsum", log_g_cumsum, (total, num_heads_v))
    check_boundaries(given, "cu_seqlens", cu_seqlens, total, "q")
    chunk_size = _parse_chunk_size(chunk_size)
    scale = parse_scale(scale, head_dim, given["q"].dtype)
    _result(given, "out", out, (total, num_heads_v, head_dim_v))
    _check_rows(given, rows, chunk_size)
    _check_gates(given, "log_g_cumsum")
    infos = {_FIELDS.get(name, name): info for name, info in given.items()}
    return _problem("chunk_gated_output", infos, scale, chunk_size, final=False), infos


def describe_chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    log_g: Any,
    beta: Any,
    *,
    scale: Any = None,
    initial_state: Any = None,
    output_final_state: Any = False,
    cu_seqlens: Any = None,
    chunk_size: Any = 64,
    out: Any = None,
) -> tuple[GatedProblem, dict[str, ArrayInfo]]:
    """Check a call of `chunk_gated_delta_rule`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    infos = _delta_rule_inputs(q, k, v, log_g, beta)
    batch, total, num_heads_v, head_dim_v = infos["v"].shape
    head_dim = infos["q"].shape[-1]
    num_sequences = batch
    if cu_seqlens is not None:
        if batch != 1:
            raise ValueError(f"q has batch {batch}, expected 1 with cu_seqlens")
        check_boundaries(infos, "cu_seqlens", cu_seqlens, total, "q")
        num_sequences = infos["cu_seqlens"].shape[0] - 1
    if initial_state is not None:
        shape = num_sequences, num_heads_v, head_dim, head_dim_v
        _state(infos, "initial_state", initial_state, shape, (computed_dtype(infos["q"].dtype),))
    chunk_size = _parse_chunk_size(chunk_size)
    scale = parse_scale(scale, head_dim, infos["q"].dtype)
    final = parse_flag("output_final_state", output_final_state)
    _result(infos, "out", out, infos["v"].shape)
    _check_gates(infos, "log_g")
    return _problem("chunk_gated_delta_rule", infos, scale, chunk_size, final), infos


def describe_recurrent_gated_delta_rule(
    q: Any, k: Any, v: Any, log_g: Any, beta: Any, state: Any, *, scale: Any = None, out: Any = None
) -> tuple[GatedProblem, dict[str, ArrayInfo]]:
    """Check a call of `recurrent_gated_delta_rule`; return its meaning and the arrays that it names.

    Raises
    ------
    TypeError, ValueError
        With argument, got and expected, for anything that the contract excludes.
    """
    given = _delta_rule_inputs(q, k, v, log_g, beta)
    batch, _, num_heads_v, head_dim_v = given["v"].shape
    head_dim = given["q"].shape[-1]
    others = list(given.items())
    shape = batch, num_heads_v, head_dim, head_dim_v
    dtype = computed_dtype(given["q"].dtype)
    if state is None or state is MISSING:
        zeros = f"zeros of shape (B, Hv, K, V), here {shape}, and dtype {dtype} to begin with"
        refuse("state", brief(state), f"; it is updated in place: {zeros}")
    _state(given, "state", state, shape, (dtype,))
    check_result("state", given["state"], shape, others)
    scale = parse_scale(scale, head_dim, given["q"].dtype)
    _result(given, "out", out, given["v"].shape)
    _check_gates(given, "log_g")
    infos = {name: info for name, info in given.items() if name != "state"}
    infos["initial_state"] = infos["final_state"] = given["state"]
    return _problem("recurrent_gated_delta_rule", infos, scale, 0, final=True), infos


def _delta_rule_inputs(q: Any, k: Any, v: Any, log_g: Any, beta: Any) -> dict[str, ArrayInfo]:
    """Check what both forms of the delta rule take for each token."""
    infos = _operands(_AXES, q=q, k=k, v=v)
    rows = infos["v"].shape[:-1]
    _per_token(infos, "log_g", log_g, rows)
    _per_token(infos, "beta", beta, rows)
    return infos


def _operands(axes: str, **arrays: Any) -> dict[str, ArrayInfo]:
    """Check q, k and the values, by their names."""
    infos = {name: inspect(name, x) for name, x in arrays.items()}
    names = list(infos)
    q, k, v = infos.values()
    for name, info in infos.items():
        _check_float(name, info)
        same_device(name, info, "q", q)
        if info.dtype != q.dtype:
            shared = f"q, k and {names[-1]} share one dtype"
            raise TypeError(f"{name} has dtype {info.dtype} but q has {q.dtype}; {shared}, convert with .astype()")
        if len(info.shape) != len(axes.split(",")):
            raise ValueError(f"{name} has shape {info.shape}, expected {axes}")
    for name, info in zip(names[1:], (k, v), strict=True):
        if info.shape[-3] != q.shape[-3]:
            raise ValueError(f"{name} has {info.shape[-3]} tokens but q has {q.shape[-3]}")
        if info.shape[:-3] != q.shape[:-3]:
            raise ValueError(f"{name} has batch {info.shape[0]} but q has {q.shape[0]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]} but q has {q.shape[-1]}")
    for name, info in zip((names[0], names[2]), (q, v), strict=True):
        if not 1 <= info.shape[-1] <= MAX_GATED_HEAD_DIM:
            raise ValueError(f"{name} has head_dim {info.shape[-1]}, expected 1 to {MAX_GATED_HEAD_DIM}")
    num_heads, num_heads_v = q.shape[-2], v.shape[-2]
    if k.shape[-2] != num_heads:
        raise ValueError(f"k has {k.shape[-2]} heads but q has {num_heads}")
    if num_heads_v % num_heads if num_heads else num_heads_v:
        raise ValueError(f"{names[2]} has {num_heads_v} heads, expected a multiple of the {num_heads} heads of q and k")
    if num_heads_v > MAX_HEADS_ON_GPU and q.device != HOST:
        raise ValueError(f"{names[2]} has {num_heads_v} heads, expected at most {MAX_HEADS_ON_GPU} on a GPU")
    return infos


def _check_float(name: str, info: ArrayInfo) -> None:
    if info.dtype not in FLOAT_NAMES:
        raise TypeError(f"{name} has dtype {info.dtype}, expected float16, bfloat16, float32 or float64")


def _per_token(infos: dict[str, ArrayInfo], name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Check an array with a number for each token and head of the values, and enter it in `infos`."""
    info = inspect(name, x)
    _check_float(name, info)
    same_device(name, info, "q", infos["q"])
    if info.shape != shape:
        raise ValueError(f"{name} has shape {info.shape}, expected {shape}")
    infos[name] = info


def _state(infos: dict[str, ArrayInfo], name: str, x: Any, shape: tuple[Any, ...], dtypes: tuple[str, ...]) -> int:
    """Check states, of any number if `shape` begins with a word, and enter them in `infos`; return how many."""
    info = inspect(name, x)
    if len(dtypes) > 1:
        _check_float(name, info)
    elif info.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {info.dtype}, expected {dtypes[0]} (q has {infos['q'].dtype})")
    same_device(name, info, "q", infos["q"])
    rows = info.shape[0] if info.shape and isinstance(shape[0], str) else shape[0]
    wanted = rows, *shape[1:]
    if info.shape != wanted:
        swapped = info.shape == (*wanted[:2], wanted[3], wanted[2])
        hint = f"; if features of v come before those of k, pass {name}.swapaxes(-1, -2)" if swapped else ""
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {info.shape}, expected ({expected}){hint}")
    infos[name] = info
    return rows


def _parse_chunk_size(chunk_size: Any) -> int:
    expected = "16, 32, 64 or 128"
    value = parse_integer("chunk_size", chunk_size, expected)
    if value not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {value}, expected {expected}")
    return value


def _result(infos: dict[str, ArrayInfo], name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Check an array for the output, if there is one, and enter it in `infos`."""
    if x is None:
        return
    info, dtype = inspect(name, x), infos["q"].dtype
    if info.dtype != dtype:
        raise TypeError(f"{name} has dtype {info.dtype}, expected {dtype} as q has")
    check_result(name, info, shape, list(infos.items()))
    infos[name] = info


def _values(info: ArrayInfo) -> np.ndarray | None:
    """Return an array that can be looked into without waiting for a GPU."""
    return info.array if info.device == HOST else None


def _check_rows(infos: dict[str, ArrayInfo], rows: int, chunk_size: int) -> None:
    """Raise if there are fewer states than NumPy's boundaries make chunks."""
    boundaries = _values(infos["cu_seqlens"])
    if boundaries is None:
        return
    num_chunks = int((-(-np.diff(boundaries.astype(np.int64)) // chunk_size)).sum())
    if rows < num_chunks:
        raise ValueError(
            f"h has {rows} states, expected at least {num_chunks}, one for each chunk of {chunk_size} tokens or fewer"
        )


def _check_gates(infos: dict[str, ArrayInfo], name: str) -> None:
    """Raise if one of NumPy's gates is above 0 or NaN; behind the last sequence they may be anything."""
    gates = _values(infos[name])
    if gates is None:
        return
    if "cu_seqlens" in infos and (boundaries := _values(infos["cu_seqlens"])) is not None:
        gates = gates[..., : int(boundaries[-1]), :]
    with np.errstate(invalid="ignore"):
        right = gates <= 0
    if not right.all():
        at = tuple(map(int, np.argwhere(~right)[0]))
        place = ", ".join(map(str, at))
        raise ValueError(f"{name}[{place}] is {gates[at]}, expected at most 0: it is the natural logarithm of a decay")


def _problem(op: str, infos: dict[str, ArrayInfo], scale: float, chunk_size: int, final: bool) -> GatedProblem:
    """Return the meaning of a checked call, whose arrays go by the names of `GATED_ARRAYS`."""
    q, v, cu_seqlens = infos["q"], infos["v"], infos.get("cu_seqlens")
    num_sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    num_heads_v, head_dim, head_dim_v = v.shape[-2], q.shape[-1], v.shape[-1]
    # What is not given will be allocated, so that address 0 stands for any that is aligned.
    seen = dict(infos)
    if "out" not in seen:
        seen["out"] = _new(v.shape, strides_like(v.shape, q.strides, ITEMSIZE[q.dtype]), q.dtype)
    if final and "final_state" not in seen:
        shape, dtype = (num_sequences, num_heads_v, head_dim, head_dim_v), computed_dtype(infos["q"].dtype)
        like = infos["initial_state"].strides if "initial_state" in infos else None
        size = ITEMSIZE[dtype]
        strides = strides_like(shape, like, size) if like else contiguous_strides(shape, size)
        seen["final_state"] = _new(shape, strides, dtype)
    states = [name for name in _STATES if name in seen]
    swapped = bool(states) and all(_is_swapped(seen[name]) for name in states)
    moved = {name: _swapped(seen[name]) for name in states} if swapped else {}
    aligned = seen | moved
    results = [name for name in ("out", "final_state") if name in seen]
    traits = GatedTraits(
        op=op,
        dtype=q.dtype,
        gate_dtype=infos["log_g"].dtype,
        beta_dtype=infos["beta"].dtype if "beta" in infos else "",
        state_dtype=infos["states"].dtype if "states" in infos else computed_dtype(infos["q"].dtype),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        chunk_size=chunk_size,
        packed=cu_seqlens is not None,
        input_alignment=_alignment({name: info for name, info in aligned.items() if name not in results}),
        result_alignment=_alignment({name: aligned[name] for name in results}),
        swapped_states=swapped,
    )
    return GatedProblem(
        traits=traits,
        num_sequences=num_sequences,
        seqlen=q.shape[-3],
        num_heads=q.shape[-2],
        num_heads_v=num_heads_v,
        num_chunks=infos["states"].shape[0] if "states" in infos else 0,
        scale=scale,
        strides=_strides(seen),
        cu_seqlens_dtype="" if cu_seqlens is None else cu_seqlens.dtype,
    )


def _is_swapped(state: ArrayInfo) -> bool:
    """Whether features of k are neighbours in memory, and not those of v."""
    return state.strides[-2] == ITEMSIZE[state.dtype] != state.strides[-1]


def _swapped(state: ArrayInfo) -> ArrayInfo:
    *axes, rows, columns = range(len(state.shape))
    order = (*axes, columns, rows)
    shape, strides = (tuple(given[axis] for axis in order) for given in (state.shape, state.strides))
    return state._replace(shape=shape, strides=strides)


def _new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> ArrayInfo:
    return ArrayInfo(None, shape, strides, dtype, 0, HOST, True)


def _strides(infos: dict[str, ArrayInfo]) -> GatedStrides:
    """Strides of all arrays, with an axis of batches for those whose tokens have none."""
    found: dict[str, Any] = dict.fromkeys(GATED_ARRAYS)
    for name, info in infos.items():
        axes = {"log_g": 3, "beta": 3, "cu_seqlens": 1}.get(name, 4)
        found[name] = (0,) * (axes - len(info.strides)) + info.strides
    return GatedStrides(**found)


def _alignment(infos: dict[str, ArrayInfo]) -> int:
    """Bytes that can move together of arrays by their names; 1 if an element of any lies on no boundary."""
    vectors, smallest = True, 16
    for name, info in infos.items():
        size = ITEMSIZE[info.dtype]
        if name in _VECTORS:
            smallest = min(smallest, size)
        if 0 in info.shape:
            continue
        boundary = alignment_of(info.pointer, info.shape, info.strides)
        if boundary < size or (info.shape[-1] > 1 and info.strides[-1] % size):
            return 1
        if name in _VECTORS:
            vectors &= boundary == 16 and info.strides[-1] == size and info.shape[-1] * size % 16 == 0
    return 16 if vectors else smallest
