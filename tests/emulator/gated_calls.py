"""Calls of the gated delta rule's kernels that between them miss every guard and every barrier, as `calls.py` has them.

Each takes a back end and raises AssertionError if the kernel does what it must not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from gated_cases import TOKENS, draw, draw_output, draw_packed, gates_of_kind
from kernels.test_gated import (
    CHUNKS,
    OUTPUT,
    RECURRENT,
    BackEnd,
    check_chunks,
    check_output,
    check_recurrent,
    cut_after,
    unchecked,
)

from cuflash.plan.gated import GatedSpec
from cuflash.problem.arrays import DTYPES
from cuflash.testing import Poisoned

Call = Callable[[BackEnd], None]


def back_end_of(spec: GatedSpec, sources: Path) -> BackEnd:
    """The emulator with changed sources, in the type in which the row is the most exact."""
    return BackEnd(spec.name, DTYPES["float32" if "float32" in spec.dtypes else "float16"], sources=sources)


def _output(
    back_end: BackEnd,
    heads: tuple[int, int, int, int],
    chunk_size: int = 64,
    swap: bool = False,
    layout: str = "contiguous",
    state_dtype: str = "",
) -> None:
    boundaries = [0, chunk_size + 1, chunk_size + 1, chunk_size + 22]
    arrays = draw_output(boundaries, back_end.dtype, chunk_size=chunk_size, gap=19, surplus=1, heads=heads)
    if not state_dtype:
        arrays["h"] = arrays["h"].astype(back_end.dtype)
    check_output(back_end, arrays, layout, give_out=True, swap=swap, chunk_size=chunk_size)


def _output_of_many_heads(back_end: BackEnd, swap: bool) -> None:
    """Four or two that share keys to a block."""
    for heads in ((2, 8, 16, 24), (3, 6, 16, 24)):
        arrays = draw_output([0, 9, 160, 220], back_end.dtype, chunk_size=16, heads=heads)
        arrays["h"] = arrays["h"].astype(back_end.dtype)
        check_output(back_end._replace(num_multiprocessors=1), arrays, give_out=True, swap=swap, chunk_size=16)


def _output_of_decays(back_end: BackEnd) -> None:
    for kind in ("reset some", "reset or none"):
        arrays = draw_output([0, 64], back_end.dtype, heads=(1, 1, 16, 16))
        gates = np.cumsum(gates_of_kind(kind, arrays["log_g_cumsum"].shape), axis=0)
        check_output(back_end, arrays | {"log_g_cumsum": gates.astype(np.float32)})


def _other_states(back_end: BackEnd) -> None:
    for swap in (False, True):
        arrays = draw_output([0, 30], back_end.dtype, heads=(1, 1, 20, 24))
        check_output(back_end, arrays | {"h": arrays["h"].astype(np.float64)}, swap=swap)
        check_output(back_end, arrays | {"h": arrays["h"].astype(back_end.dtype)}, swap=swap)


def _missing_states(back_end: BackEnd) -> None:
    arrays = draw_output([0, 70, 100], back_end.dtype, heads=(1, 2, 16, 16))
    given = {("v_new" if name == "v" else name): x.copy() for name, x in arrays.items()} | {"h": arrays["h"][:1].copy()}
    given["cu_seqlens"][:] = 0
    out = unchecked(back_end, given, arrays["cu_seqlens"])
    with_zeros = np.concatenate([arrays["h"][:1], np.zeros_like(arrays["h"][1:])])
    assert out.tobytes() == check_output(back_end, arrays | {"h": with_zeros}).tobytes()


def _malformed(back_end: BackEnd, values: tuple[int, ...]) -> None:
    arrays = draw_output([0, 100], back_end.dtype, heads=(1, 2, 16, 16))
    given = {("v_new" if name == "v" else name): x for name, x in arrays.items()}
    given["cu_seqlens"] = np.zeros(len(values), np.int64)
    written = Poisoned(np, arrays["v"].shape, back_end.dtype, "contiguous")
    unchecked(back_end, given, np.array(values), out=written.array)
    assert not np.isnan(written.values().astype(np.float64)).any(), "rows that nobody wrote"


def _rows_of_no_sequence(back_end: BackEnd) -> None:
    """In front of the first and behind the last."""
    arrays = draw_output([0, 100], back_end.dtype, heads=(1, 2, 16, 16))
    given = {("v_new" if name == "v" else name): x for name, x in arrays.items()}
    given["cu_seqlens"] = np.zeros(2, np.int64)
    out = unchecked(back_end, given, np.array([5, 90]))
    assert (out[:5] == 0).all() and (out[90:] == 0).all() and (out[5:90] != 0).any()


def _chunks(back_end: BackEnd, heads: tuple[int, int, int, int], layout: str, swap: bool) -> None:
    arrays = draw((2, 70, *heads), back_end.dtype)
    arrays["log_g"] = gates_of_kind("reset some", arrays["log_g"].shape).astype(np.float32)
    check_chunks(back_end, arrays, layout, give_out=True, swap=swap)


def _cut(
    back_end: BackEnd, heads: tuple[int, int, int, int], layout: str = "contiguous", shape: tuple[int, int] = (2, 150)
) -> None:
    arrays = draw((*shape, *heads), back_end.dtype)
    with cut_after(1):
        check_chunks(back_end, arrays, layout, give_out=True)
        del arrays["initial_state"]
        check_chunks(back_end, arrays, layout)


def _cut_of_nothing(back_end: BackEnd) -> None:
    """What grows without bound makes nothing of nothing."""
    arrays = draw((1, 1024, 1, 1, 16, 16), back_end.dtype)
    arrays = {name: np.zeros_like(x) if name in ("v", "initial_state", "log_g") else x for name, x in arrays.items()}
    arrays["beta"][...] = 2
    arrays["k"] *= np.asarray(1.25, arrays["k"].dtype)
    with cut_after(4):
        out, _ = check_chunks(back_end, arrays)
    assert not out.astype(np.float64).any()


def _packed(back_end: BackEnd) -> None:
    arrays = draw_packed([0, 65, 65, 100], back_end.dtype, 67)
    check_chunks(back_end, arrays, give_out=True)
    del arrays["initial_state"]
    check_chunks(back_end, arrays)


def _exact_keys(back_end: BackEnd) -> None:
    """Whatever is behind the last token, and keys that are the same."""
    arrays = draw((1, 65, 1, 1, 32, 16), back_end.dtype)
    arrays["k"][...] = arrays["k"][:, :1]
    arrays["log_g"][...] = 0
    check_chunks(back_end, arrays)


def _without_final_state(back_end: BackEnd) -> None:
    arrays = draw((1, 10, 1, 1, 16, 16), back_end.dtype)
    out = back_end.call(CHUNKS, *(arrays[name] for name in TOKENS))
    arrays["initial_state"][...] = 0
    assert out.tobytes() == check_chunks(back_end, arrays)[0].tobytes()


def _outside(back_end: BackEnd, values: tuple[int, ...]) -> None:
    arrays = draw_packed([0, 100], back_end.dtype, 0) | {"cu_seqlens": np.zeros(len(values), np.int64)}
    del arrays["initial_state"]
    written = Poisoned(np, arrays["v"].shape, back_end.dtype, "contiguous")
    unchecked(back_end, arrays, np.array(values), out=written.array, output_final_state=True)
    assert not np.isnan(written.values().astype(np.float64)).any(), "rows that nobody wrote"


def _recurrent(back_end: BackEnd, layout: str, swap: bool, heads: tuple[int, int, int, int]) -> None:
    check_recurrent(back_end, draw((2, 3, *heads), back_end.dtype), layout, give_out=True, swap=swap)


MALFORMED = (
    (5, 3, 100, 20), (-7, 40, 30, 900), (0, 50, -(2**62), 80), (0, 900 - 2**32, 40), tuple(range(70, 0, -1)),
)  # fmt: skip

GATED_CALLS: dict[str, list[Call]] = {
    OUTPUT: [
        partial(_output, heads=(1, 2, 20, 24), layout="gaps"),
        partial(_output, heads=(1, 2, 20, 24), chunk_size=16, layout="gaps"),
        partial(_output, heads=(2, 2, 32, 72)),
        partial(_output, heads=(2, 2, 32, 72), swap=True),
        partial(_output, heads=(2, 2, 32, 72), state_dtype="float32"),
        partial(_output, heads=(1, 1, 20, 24), chunk_size=32, swap=True, layout="every_second"),
        partial(_output, heads=(1, 1, 16, 136), chunk_size=16),
        partial(_output_of_many_heads, swap=False),
        partial(_output_of_many_heads, swap=True),
        _output_of_decays,
        _other_states,
        _missing_states,
        _rows_of_no_sequence,
        *(
            partial(_malformed, values=values)
            for values in (
                (5, 3, 100, 20),
                (-7, 40, 30, 900),
                (0, 50, -(2**62), 80),
                (0, 900 - 2**32, 40),
                tuple(range(70, 0, -1)),
            )
        ),
    ],
    CHUNKS: [
        partial(_chunks, heads=(1, 2, 20, 24), layout="gaps", swap=False),
        partial(_chunks, heads=(1, 1, 136, 16), layout="contiguous", swap=False),
        partial(_chunks, heads=(2, 2, 32, 72), layout="contiguous", swap=False),
        partial(_chunks, heads=(1, 1, 64, 64), layout="contiguous", swap=True),
        partial(_cut, heads=(1, 2, 24, 40)),
        partial(_cut, heads=(1, 1, 20, 3), layout="gaps"),
        partial(_cut, heads=(1, 1, 20, 1), shape=(1, 100)),
        partial(_cut, heads=(1, 1, 136, 16)),
        _cut_of_nothing,
        _packed,
        _exact_keys,
        _without_final_state,
        *(partial(_outside, values=values) for values in ((-7, 40, 900), (0, 10**9, 10**9), (0, -5, 100))),
    ],
    RECURRENT: [
        partial(_recurrent, layout="contiguous", swap=False, heads=(1, 2, 32, 40)),
        partial(_recurrent, layout="contiguous", swap=True, heads=(1, 2, 36, 40)),
        partial(_recurrent, layout="gaps", swap=False, heads=(1, 2, 33, 41)),
        partial(_recurrent, layout="contiguous", swap=False, heads=(1, 1, 160, 24)),
    ],
}
"""By operation; a row is called for each of its own."""


def calls_of(spec: GatedSpec) -> list[Call]:
    """Calls of a row."""
    return [call for op in spec.operations for call in GATED_CALLS[op]]
