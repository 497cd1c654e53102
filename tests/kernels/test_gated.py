"""Every kernel of the gated delta rule against the float64 definition, on the emulator and on a GPU.

Bound = twice the error of the formula that the kernel has, step by step in its types: tensor cores multiply operands of
16 bits and add in float32. Positions of 0 are exact, memory around arrays is NaN and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from emulator.emulator import compiler
from emulator.gated import GatedEmulator
from gated_cases import (
    BOUNDARIES,
    KINDS,
    LAYOUTS,
    TOKENS,
    Arrays,
    Heads,
    Shape,
    assert_close,
    computed_dtype,
    draw,
    draw_output,
    draw_packed,
    gates_of_kind,
    naive,
    naive_output,
    without_rest,
)

import cuflash
from cuflash import reference
from cuflash.gpu import gated as gpu_gated
from cuflash.plan import gated as plan_gated
from cuflash.plan.gated import GATED_KERNELS, GatedSpec
from cuflash.plan.table import device_of
from cuflash.problem.arrays import DTYPES, ITEMSIZE
from cuflash.problem.describe_gated import describe_chunk_gated_delta_rule, describe_chunk_gated_output
from cuflash.testing import Poisoned

OUTPUT, CHUNKS, RECURRENT = "chunk_gated_output", "chunk_gated_delta_rule", "recurrent_gated_delta_rule"
EMULATED = {
    "gated_output_mma": ("float16", "bfloat16"),
    "gated_output": ("float32", "float64"),
    "gated_delta_wgmma": ("float16", "bfloat16"),
    "gated_delta_mma": ("float16", "bfloat16"),
    "gated_recurrent": ("float16", "float32", "float64"),
}
"""Types that a row treats in ways of their own; a GPU runs the others, too."""
PARTS = 16
"""A run has one in so many of the cases that are emulated."""


class BackEnd(NamedTuple):
    """Something that computes the gated delta rule by one kernel."""

    kernel: str
    dtype: np.dtype
    on_gpu: bool = False
    tile: str = ""
    seed: int = 0
    """Order in which an emulated kernel's threads take turns."""
    sources: Path | None = None
    """CUDA sources in place of the package's own, of the emulator."""
    num_multiprocessors: int = 132
    """Of the emulated device: where they are few, blocks compute several heads."""

    @property
    def spec(self) -> GatedSpec:
        """The kernel's row."""
        return next(spec for spec in GATED_KERNELS if spec.name == self.kernel)

    @property
    def rounded(self) -> Any:
        """Type to which the kernel rounds operands of products, if it does."""
        return self.dtype if self.spec.min_compute_capability >= 80 else None

    @property
    def xp(self) -> Any:
        """Module of its arrays."""
        if not self.on_gpu:
            return np
        import cupy

        return cupy

    @property
    def emulator(self) -> GatedEmulator:
        """What emulates the kernel."""
        device = device_of(90)._replace(num_multiprocessors=self.num_multiprocessors)
        return GatedEmulator(self.kernel, self.tile, device, self.seed, self.sources)

    def call(self, op: str, *arrays: Any, **options: Any) -> Any:
        """Call a function of `cuflash`; skip what the kernel refuses."""
        try:
            if not self.on_gpu:
                return getattr(self.emulator, op)(*arrays, **options)
            with cuflash.options(kernel=self.kernel, tile=self.tile):
                return getattr(cuflash, op)(*arrays, **options)
        except ValueError as error:
            if "cannot serve this call" not in str(error):
                raise
            pytest.skip(str(error))

    def host(self, x: Any) -> np.ndarray:
        """Return an array on the CPU."""
        return x.get() if self.on_gpu else x


def _back_ends(op: str) -> Iterator[Any]:
    no_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
    for spec in GATED_KERNELS:
        for dtype in spec.dtypes if op in spec.operations else ():
            if dtype in EMULATED[spec.name]:
                marks = [no_compiler, pytest.mark.share(PARTS)]
                yield pytest.param(BackEnd(spec.name, DTYPES[dtype]), id=f"emulated-{spec.name}-{dtype}", marks=marks)
            back_end = BackEnd(spec.name, DTYPES[dtype], True)
            yield pytest.param(back_end, id=f"gpu-{spec.name}-{dtype}", marks=pytest.mark.gpu)


by_output, by_chunks, by_recurrence = (
    pytest.mark.parametrize("back_end", list(_back_ends(op))) for op in (OUTPUT, CHUNKS, RECURRENT)
)


def _place(back_end: BackEnd, arrays: Arrays, layout: str, swap: bool) -> tuple[dict[str, Poisoned], dict[str, Any]]:
    """Put arrays into poisoned memory, `swap`ped states with features of v first; also return them as arguments."""
    held = {name: x.swapaxes(-1, -2) if swap and name in ("h", "initial_state") else x for name, x in arrays.items()}
    placed = {
        name: Poisoned(back_end.xp, x.shape, x.dtype, "contiguous" if name == "cu_seqlens" else layout, x)
        for name, x in held.items()
    }
    given = {name: x.array for name, x in placed.items()}
    for name in ("h", "initial_state"):
        if swap and name in given:
            given[name] = given[name].swapaxes(-1, -2)
    return placed, given


def check_output(
    back_end: BackEnd,
    arrays: Arrays,
    layout: str = "contiguous",
    *,
    give_out: bool = False,
    swap: bool = False,
    **options: Any,
) -> np.ndarray:
    """Call `chunk_gated_output` and compare it with the definition; 0 behind the last sequence."""
    placed, given = _place(back_end, arrays, layout, swap)
    given["v_new"] = given.pop("v")
    written = Poisoned(back_end.xp, arrays["v"].shape, back_end.dtype, layout) if give_out else None
    out = back_end.call(OUTPUT, **given, **options, **({} if written is None else {"out": written.array}))
    assert all(x.unchanged() for x in placed.values()), "an input was changed"
    assert written is None or (out is written.array and written.unchanged(outside_only=True))
    assert out.dtype == back_end.dtype
    found = back_end.host(out) if written is None else written.values()
    last = int(arrays["cu_seqlens"][-1])
    np.testing.assert_array_equal(found[last:].astype(np.float64), 0)
    exact = reference.chunk_gated_output(**{("v_new" if x == "v" else x): y for x, y in arrays.items()}, **options)
    plain = naive_output(arrays, rounded=back_end.rounded, **options)
    assert_close(found[:last], exact[:last], [x[:last] for x in plain])
    return found


def check_chunks(
    back_end: BackEnd,
    arrays: Arrays,
    layout: str = "contiguous",
    *,
    give_out: bool = False,
    swap: bool = False,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Call `chunk_gated_delta_rule` and compare it with the definition."""
    placed, given = _place(back_end, arrays, layout, swap)
    tokens = [given.pop(name) for name in TOKENS]
    written = Poisoned(back_end.xp, arrays["v"].shape, back_end.dtype, layout) if give_out else None
    extra = {} if written is None else {"out": written.array}
    out, state = back_end.call(CHUNKS, *tokens, output_final_state=True, **given, **options, **extra)
    assert all(x.unchanged() for x in placed.values()), "an input was changed"
    assert written is None or (out is written.array and written.unchanged(outside_only=True))
    assert out.dtype == back_end.dtype and state.dtype == computed_dtype(back_end.dtype)
    found = back_end.host(out) if written is None else written.values()
    known = {"cu_seqlens": arrays.get("cu_seqlens"), "scale": options.get("scale")}
    counted = without_rest(arrays)
    initial = {"initial_state": arrays["initial_state"]} if "initial_state" in arrays else {}
    exact = reference.gated_delta_rule(*(counted[x] for x in TOKENS), **initial, **known)
    counted = {"initial_state": np.zeros(exact[1].shape, state.dtype), **counted}
    plain = naive(counted, rounded=back_end.rounded, **known)
    assert_close(found, exact[0], [x for x, _ in plain], "out")
    assert_close(back_end.host(state), exact[1], [x for _, x in plain], "state")
    if "cu_seqlens" in arrays:
        np.testing.assert_array_equal(found[:, int(arrays["cu_seqlens"][-1]) :].astype(np.float64), 0)
    return found, back_end.host(state)


def check_recurrent(
    back_end: BackEnd,
    arrays: Arrays,
    layout: str = "contiguous",
    *,
    give_out: bool = False,
    swap: bool = False,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Call `recurrent_gated_delta_rule` and compare it with the definition."""
    placed, given = _place(back_end, arrays, layout, swap)
    state = placed.pop("initial_state")
    written = Poisoned(back_end.xp, arrays["v"].shape, back_end.dtype, layout) if give_out else None
    extra = {} if written is None else {"out": written.array}
    tokens = [given[name] for name in TOKENS]
    out = back_end.call(RECURRENT, *tokens, given["initial_state"], **options, **extra)
    assert all(x.unchanged() for x in placed.values()), "an input was changed"
    assert state.unchanged(outside_only=True)
    assert written is None or (out is written.array and written.unchanged(outside_only=True))
    assert out.dtype == back_end.dtype
    found = back_end.host(out) if written is None else written.values()
    last = state.values().swapaxes(-1, -2) if swap else state.values()
    known = {"scale": options.get("scale")}
    exact = reference.gated_delta_rule(*(arrays[x] for x in TOKENS), initial_state=arrays["initial_state"], **known)
    plain = naive(arrays, **known)
    assert_close(found, exact[0], [x for x, _ in plain], "out")
    assert_close(last, exact[1], [x for _, x in plain], "state")
    return found, last


# Every kernel, in every run

SMALL: dict[str, tuple[str, str, bool]] = {
    "gated_output_mma": (OUTPUT, "float16", False),
    "gated_output": (OUTPUT, "float32", False),
    "gated_delta_wgmma": (CHUNKS, "bfloat16", True),
    "gated_delta_mma": (CHUNKS, "bfloat16", True),
    "gated_recurrent": (RECURRENT, "float32", True),
}


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")
@pytest.mark.parametrize("kernel", SMALL)
def test_emulated(kernel: str) -> None:
    op, dtype, swap = SMALL[kernel]
    back_end = BackEnd(kernel, DTYPES[dtype])
    if op == OUTPUT:
        check_output(back_end, draw_output([0, 17, 17, 70], back_end.dtype, gap=2, surplus=1, heads=(1, 2, 32, 32)))
    elif op == CHUNKS:
        check_chunks(back_end, draw((1, 70, 1, 2, 32, 24), back_end.dtype), swap=swap)
    else:
        check_recurrent(back_end, draw((2, 3, 1, 2, 32, 40), back_end.dtype), swap=swap)


def test_every_row_is_emulated() -> None:
    assert set(EMULATED) == set(SMALL) == {spec.name for spec in GATED_KERNELS}


# The output of chunks


@by_output
@pytest.mark.parametrize("boundaries", BOUNDARIES, ids=str)
def test_output_of_packed_sequences(back_end: BackEnd, boundaries: list[int]) -> None:
    check_output(back_end, draw_output(boundaries, back_end.dtype, gap=3, surplus=2))


@by_output
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(
    "heads",
    [(1, 1, 1, 1), (1, 2, 128, 128), (2, 2, 64, 136), (1, 3, 96, 80), (1, 1, 256, 256), (1, 4, 100, 7)],
    ids=str,
)
def test_output_of_heads(back_end: BackEnd, heads: Heads, swap: bool) -> None:
    check_output(back_end, draw_output([0, 65, 80], back_end.dtype, heads=heads), swap=swap)


@by_output
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("num_heads", "num_heads_v"), [(4, 8), (2, 8), (2, 16), (2, 12)])
def test_output_of_heads_that_share_keys(back_end: BackEnd, num_heads: int, num_heads_v: int, swap: bool) -> None:
    """So many chunks that blocks compute up to four heads one after the other."""
    tokens = 30000 if back_end.on_gpu else 400
    boundaries = [0, 7, 7, tokens // 2, tokens]
    arrays = draw_output(boundaries, back_end.dtype, chunk_size=16, gap=5, heads=(num_heads, num_heads_v, 16, 24))
    check_output(back_end._replace(num_multiprocessors=1), arrays, swap=swap, chunk_size=16)


@by_output
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
def test_output_of_every_size_of_chunks(back_end: BackEnd, chunk_size: int) -> None:
    for seqlen in (1, chunk_size - 1, chunk_size, chunk_size + 1):
        arrays = draw_output([0, seqlen, seqlen + chunk_size], back_end.dtype, chunk_size=chunk_size, surplus=1)
        check_output(back_end, arrays, chunk_size=chunk_size, scale=-0.3)


@by_output
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("give_out", "swap"), [(False, False), (True, False), (True, True)])
def test_output_of_layouts(back_end: BackEnd, layout: str, give_out: bool, swap: bool) -> None:
    arrays = draw_output([0, 40, 75], back_end.dtype, gap=2, surplus=1, heads=(1, 2, 32, 16))
    check_output(back_end, arrays, layout, give_out=give_out, swap=swap)


@by_output
@pytest.mark.parametrize("state_dtype", list(DTYPES)[:4])
@pytest.mark.parametrize("gate_dtype", ["float16", "float64"])
def test_output_of_dtypes(back_end: BackEnd, state_dtype: str, gate_dtype: str) -> None:
    arrays = draw_output([0, 40, 75], back_end.dtype, heads=(1, 2, 16, 16))
    h, c = (arrays[name].astype(DTYPES[dtype]) for name, dtype in (("h", state_dtype), ("log_g_cumsum", gate_dtype)))
    check_output(back_end, arrays | {"h": h, "log_g_cumsum": c})


@by_output
@pytest.mark.parametrize("kind", KINDS)
def test_output_of_decays(back_end: BackEnd, kind: str) -> None:
    arrays = draw_output([0, 40, 140], back_end.dtype, heads=(1, 2, 16, 16))
    log_g = gates_of_kind(kind, arrays["log_g_cumsum"].shape)
    c = arrays["log_g_cumsum"]
    for begin, end in ((0, 40), (40, 104), (104, 140)):
        c[begin:end] = np.cumsum(log_g[begin:end], axis=0)
    assert np.isfinite(check_output(back_end, arrays).astype(np.float64)).all()


@by_output
def test_output_of_gates_that_have_decayed_far(back_end: BackEnd) -> None:
    """What kernels keep of sums in float64 is float32, in calls that are not float64: differences lose as much."""
    arrays = draw_output([0, 40, 75], back_end.dtype)
    gates = arrays["log_g_cumsum"].astype(np.float64)
    gates[5:40] -= 3000.1
    check_output(back_end, arrays | {"log_g_cumsum": gates})


@by_output
def test_chunks_without_a_state_have_one_of_zeros(back_end: BackEnd) -> None:
    """A GPU is not asked how many there ought to be."""
    arrays = draw_output([0, 70, 150], back_end.dtype, heads=(1, 2, 16, 16))
    few = arrays | {"h": arrays["h"][:2]}
    placed, given = _place(back_end, few | {"cu_seqlens": np.zeros_like(arrays["cu_seqlens"])}, "contiguous", False)
    given["v_new"] = given.pop("v")
    out = back_end.host(unchecked(back_end, given, arrays["cu_seqlens"]))
    with_zeros = arrays | {"h": np.concatenate([arrays["h"][:2], np.zeros_like(arrays["h"][2:])])}
    np.testing.assert_array_equal(out.astype(np.float64), check_output(back_end, with_zeros).astype(np.float64))
    assert all(x.unchanged() for name, x in placed.items() if name != "cu_seqlens")


def unchecked(back_end: BackEnd, given: dict[str, Any], boundaries: np.ndarray, **options: Any) -> Any:
    """Call with boundaries that nobody looks at before the kernel does, as on a GPU."""
    if back_end.on_gpu:
        given["cu_seqlens"][...] = back_end.xp.asarray(boundaries)
        return back_end.call(OUTPUT if "h" in given else CHUNKS, **given, **options)
    describe = describe_chunk_gated_output if "h" in given else describe_chunk_gated_delta_rule
    problem, infos = describe(**given, **options)
    given["cu_seqlens"][...] = boundaries
    return back_end.emulator.run(problem, infos, options.get("out"), options.get("output_final_state", False))


MALFORMED = {
    "late_and_falling": (5, 3, 100, 20),
    "outside": (-7, 40, 30, 900),
    "far_outside": (0, 10**9, 10**9, 10**9),
    "all_empty": (100, 100, 100, 100),
    "huge": (0, 50, -(2**62), 80),
    "long_fall": (0, *(90 - i // 4 for i in range(300)), 95),
}


@by_output
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_boundaries_stay_inside_the_arrays(back_end: BackEnd, name: str) -> None:
    boundaries = np.array(MALFORMED[name], np.int64)
    arrays = draw_output([0, 100], back_end.dtype, heads=(1, 2, 16, 16))
    arrays["cu_seqlens"] = np.zeros_like(boundaries)
    placed, given = _place(back_end, arrays, "contiguous", False)
    given["v_new"] = given.pop("v")
    written = Poisoned(back_end.xp, arrays["v"].shape, back_end.dtype, "contiguous")
    unchecked(back_end, given, boundaries, out=written.array)
    assert written.unchanged(outside_only=True)
    assert all(x.unchanged() for name, x in placed.items() if name != "cu_seqlens")


# The delta rule in chunks

SHAPES: list[Shape] = [
    (1, 1, 1, 1, 1, 1),
    (2, 17, 1, 2, 5, 3),
    (1, 70, 2, 2, 16, 24),
    (3, 64, 1, 3, 24, 8),
    (1, 130, 1, 3, 96, 33),
    (2, 33, 2, 2, 7, 256),
    (1, 40, 1, 1, 256, 16),
    (1, 129, 1, 2, 64, 64),
    (1, 65, 1, 2, 128, 128),
    (1, 66, 1, 1, 256, 256),
]


@by_chunks
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_of_shapes(back_end: BackEnd, shape: Shape) -> None:
    check_chunks(back_end, draw(shape, back_end.dtype))


@by_chunks
@pytest.mark.parametrize("boundaries", BOUNDARIES, ids=str)
def test_chunks_of_packed_sequences(back_end: BackEnd, boundaries: list[int]) -> None:
    check_chunks(back_end, draw_packed(boundaries, back_end.dtype, 3))


@by_chunks
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("give_out", "swap"), [(False, False), (True, False), (True, True)])
def test_chunks_of_layouts(back_end: BackEnd, layout: str, give_out: bool, swap: bool) -> None:
    check_chunks(back_end, draw((2, 35, 1, 2, 32, 16), back_end.dtype), layout, give_out=give_out, swap=swap)


@by_chunks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate_dtype", [np.float32, np.float64])
def test_chunks_of_decays(back_end: BackEnd, kind: str, gate_dtype: Any) -> None:
    arrays = draw((1, 150, 1, 2, 16, 16), back_end.dtype)
    arrays["log_g"] = gates_of_kind(kind, arrays["log_g"].shape).astype(gate_dtype)
    out, state = check_chunks(back_end, arrays)
    assert np.isfinite(out.astype(np.float64)).all() and np.isfinite(state).all()


@by_chunks
def test_reset_forgets_exactly(back_end: BackEnd) -> None:
    arrays = draw((1, 100, 1, 2, 16, 16), back_end.dtype)
    arrays["log_g"][:, 30] = -np.inf
    first, state = check_chunks(back_end, arrays)
    for name in ("q", "k", "v"):
        arrays[name] = arrays[name].copy()
        arrays[name][:, :30] *= back_end.dtype.type(0.5)
    arrays["initial_state"] = 3 * arrays["initial_state"]
    again, last = check_chunks(back_end, arrays)
    assert first[:, 30:].tobytes() == again[:, 30:].tobytes() and state.tobytes() == last.tobytes()


@by_chunks
@pytest.mark.parametrize("dtype", list(DTYPES)[:4])
def test_chunks_of_dtypes_of_gates(back_end: BackEnd, dtype: str) -> None:
    arrays = draw((1, 70, 1, 2, 16, 16), back_end.dtype)
    check_chunks(back_end, arrays | {name: arrays[name].astype(DTYPES[dtype]) for name in ("log_g", "beta")})


@by_chunks
@pytest.mark.parametrize("distance", [1.0, 1e-1, 1e-2])
@pytest.mark.parametrize("largest", [1.0, 2.0])
@pytest.mark.parametrize("decays", [False, True])
def test_keys_that_are_nearly_parallel(back_end: BackEnd, distance: float, largest: float, decays: bool) -> None:
    arrays = draw((1, 130, 1, 2, 32, 16), back_end.dtype)
    k = arrays["k"][:, :1].astype(np.float64) + distance * arrays["k"].astype(np.float64)
    arrays["k"] = (0.99 * k / np.linalg.norm(k, axis=-1, keepdims=True)).astype(back_end.dtype)
    arrays["beta"] = np.full_like(arrays["beta"], largest)
    if not decays:
        arrays["log_g"][...] = 0
    check_chunks(back_end, arrays)


@by_chunks
@pytest.mark.parametrize("scale", [0.0, -0.7, 3])
def test_chunks_of_scales(back_end: BackEnd, scale: float) -> None:
    check_chunks(back_end, draw((1, 40, 1, 2, 8, 8), back_end.dtype), scale=scale)


@by_chunks
@pytest.mark.parametrize("packed", [False, True])
def test_without_states(back_end: BackEnd, packed: bool) -> None:
    arrays = draw_packed([0, 20, 70], back_end.dtype, 2) if packed else draw((2, 70, 1, 2, 16, 8), back_end.dtype)
    del arrays["initial_state"]
    out, _ = check_chunks(back_end, arrays)
    _, given = _place(back_end, arrays, "contiguous", False)
    tokens = [given.pop(name) for name in TOKENS]
    assert back_end.host(back_end.call(CHUNKS, *tokens, **given)).tobytes() == out.tobytes()


@contextmanager
def cut_after(chunks: int) -> Iterator[None]:
    """Have sequences cut into segments of so many chunks."""
    try:
        with mock.patch.object(plan_gated, "_walking_time", lambda *_: (0, chunks)):
            plan_gated.make_gated_plan.cache_clear()
            yield
    finally:
        plan_gated.make_gated_plan.cache_clear()


@by_chunks
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 193, 1, 2, 128, 128), (2, 257, 2, 2, 64, 40), (1, 129, 1, 1, 48, 136), (1, 200, 1, 1, 256, 16),
        (2, 80, 1, 1, 8, 8),
    ],
    ids=str,
)  # fmt: skip
def test_sequences_that_are_cut(back_end: BackEnd, shape: Shape, chunks: int) -> None:
    """Several blocks walk each; the same bits twice, and without an initial state."""
    arrays = draw(shape, back_end.dtype)
    with cut_after(chunks):
        found = check_chunks(back_end, arrays, give_out=True)
        again = check_chunks(back_end._replace(seed=3), arrays, swap=True)
        assert [x.tobytes() for x in found] == [x.tobytes() for x in again]
        del arrays["initial_state"]
        check_chunks(back_end, arrays, "every_second")


@by_chunks
@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_sequences_that_are_cut(back_end: BackEnd, kind: str) -> None:
    arrays = draw((1, 200, 1, 2, 32, 16), back_end.dtype)
    with cut_after(1):
        check_chunks(back_end, arrays | {"log_g": gates_of_kind(kind, arrays["log_g"].shape)})


@by_chunks
def test_nothing_grows_in_sequences_that_are_cut(back_end: BackEnd) -> None:
    """Long keys make anything grow without bound, and nothing of nothing."""
    arrays = draw((1, 1024, 1, 1, 16, 16), back_end.dtype)
    arrays = {name: np.zeros_like(x) if name in ("v", "initial_state", "log_g") else x for name, x in arrays.items()}
    arrays["beta"] = np.full_like(arrays["beta"], 2)
    arrays["k"] *= np.asarray(1.25, arrays["k"].dtype)
    with cut_after(4):
        out, state = check_chunks(back_end, arrays)
    assert not out.astype(np.float64).any() and not state.any()


@by_chunks
@pytest.mark.parametrize("shape", [(2, 0, 1, 2, 8, 4), (0, 5, 1, 2, 8, 4), (2, 5, 0, 0, 8, 4), (2, 5, 2, 0, 8, 4)])
def test_nothing_to_do(back_end: BackEnd, shape: Shape) -> None:
    arrays = draw(shape, back_end.dtype)
    out, state = check_chunks(back_end, arrays)
    assert out.shape == arrays["v"].shape
    np.testing.assert_array_equal(state, arrays["initial_state"])


@by_chunks
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_boundaries_of_the_delta_rule(back_end: BackEnd, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences then overlap, and blocks write the same rows: what is there is undefined, but nothing else is."""
    if not back_end.on_gpu:
        monkeypatch.setattr(gpu_gated, "MAX_GRID", 1)  # where blocks meet, the emulator has a finding in one launch
    boundaries = np.array(MALFORMED[name], np.int64)
    arrays = draw_packed([0, 100], back_end.dtype, 0)
    arrays |= {"cu_seqlens": np.zeros_like(boundaries)}
    arrays["initial_state"] = np.ones((len(boundaries) - 1, *arrays["initial_state"].shape[1:]), np.float32)
    arrays["initial_state"] = arrays["initial_state"].astype(computed_dtype(back_end.dtype))
    placed, given = _place(back_end, arrays, "contiguous", False)
    written = Poisoned(back_end.xp, arrays["v"].shape, back_end.dtype, "contiguous")
    unchecked(back_end, given, boundaries, out=written.array, output_final_state=True)
    assert written.unchanged(outside_only=True)
    assert all(x.unchanged() for name, x in placed.items() if name != "cu_seqlens")


# Token by token


@by_recurrence
@pytest.mark.parametrize("seqlen", [0, 1, 2, 17])
@pytest.mark.parametrize("heads", [(1, 1, 1, 1), (1, 2, 128, 128), (2, 4, 33, 65), (1, 1, 256, 256)], ids=str)
def test_recurrent_of_shapes(back_end: BackEnd, heads: Heads, seqlen: int) -> None:
    check_recurrent(back_end, draw((2, seqlen, *heads), back_end.dtype))


@by_recurrence
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("give_out", "swap"), [(False, False), (True, False), (True, True)])
def test_recurrent_of_layouts(back_end: BackEnd, layout: str, give_out: bool, swap: bool) -> None:
    check_recurrent(back_end, draw((2, 3, 1, 2, 32, 16), back_end.dtype), layout, give_out=give_out, swap=swap)


@by_recurrence
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_of_decays(back_end: BackEnd, kind: str) -> None:
    arrays = draw((1, 60, 1, 2, 16, 16), back_end.dtype)
    check_recurrent(back_end, arrays | {"log_g": gates_of_kind(kind, arrays["log_g"].shape)})


# All of them


@pytest.mark.parametrize("back_end", [case for op in (OUTPUT, CHUNKS, RECURRENT) for case in _back_ends(op)])
def test_twice_the_same_bits_whatever_the_tile(back_end: BackEnd) -> None:
    """Also where threads take turns in another order, and where a grid is launched in parts."""
    op = next(op for op in (RECURRENT, OUTPUT, CHUNKS) if op in back_end.spec.operations)
    if op == OUTPUT:
        arrays = draw_output([0, 70, 100], back_end.dtype, heads=(1, 2, 32, 80))
        check: Any = check_output
    else:
        arrays = draw((1, 70, 1, 2, 32, 80), back_end.dtype)
        check = check_chunks if op == CHUNKS else check_recurrent
    first = check(back_end, arrays)
    second = check(back_end._replace(seed=3), arrays)
    for x, y in zip(first, second, strict=True):
        assert x.tobytes() == y.tobytes()


@by_chunks
def test_grid_in_several_launches(back_end: BackEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_gated, "MAX_GRID", 3)
    gpu_gated._steps.cache_clear()
    try:
        check_chunks(back_end, draw((2, 70, 1, 2, 16, 40), back_end.dtype))
    finally:
        gpu_gated._steps.cache_clear()


@by_output
def test_every_tile_of_the_output(back_end: BackEnd) -> None:
    _check_every_tile(back_end, draw_output([0, 65, 80], back_end.dtype, heads=(1, 1, 64, 100)))


@by_chunks
def test_every_tile_of_chunks(back_end: BackEnd) -> None:
    _check_every_tile(back_end, draw((1, 70, 1, 1, 64, 100), back_end.dtype))


def _check_every_tile(back_end: BackEnd, arrays: Arrays) -> None:
    xs = {("v_new" if name == "v" and "h" in arrays else name): x for name, x in arrays.items()}
    describe = describe_chunk_gated_output if "h" in arrays else describe_chunk_gated_delta_rule
    problem, _ = describe(**xs)
    for tile in dict.fromkeys(map(str, back_end.spec.tiles(problem.traits, device_of(90)))):
        check = check_output if "h" in arrays else check_chunks
        check(back_end._replace(tile=tile), arrays)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [OUTPUT, CHUNKS, RECURRENT])
def test_on_the_current_stream(op: str) -> None:
    """Behind what the stream does before, without a wait."""
    import cupy

    dtype = DTYPES["float16"]
    if op == OUTPUT:
        arrays = draw_output([0, 300], dtype, heads=(2, 4, 64, 64))
        arrays["v_new"] = arrays.pop("v")
    else:
        arrays = draw((1, 300, 2, 4, 64, 64), dtype)
        arrays["state" if op == RECURRENT else "initial_state"] = arrays.pop("initial_state")
    call = getattr(cuflash, op)
    on_device = {name: cupy.asarray(x) for name, x in arrays.items()}
    expected = call(**{name: x.copy() for name, x in on_device.items()})
    stream = cupy.cuda.Stream(non_blocking=True)
    late = {name: cupy.zeros_like(x) for name, x in on_device.items()}
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(20):
            cupy.ones((2048, 2048)) @ cupy.ones((2048, 2048))
        for name, x in on_device.items():
            late[name][...] = x
        out = call(**late)
    stream.synchronize()
    assert out.get().tobytes() == expected.get().tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_recurrent_continues_chunks(dtype: str) -> None:
    import cupy

    arrays = {name: cupy.asarray(x) for name, x in draw((2, 80, 1, 2, 64, 64), DTYPES[dtype]).items()}
    tokens = [arrays[name] for name in TOKENS]
    whole, last = cuflash.chunk_gated_delta_rule(*tokens, output_final_state=True)
    _, state = cuflash.chunk_gated_delta_rule(*(x[:, :70] for x in tokens), output_final_state=True)
    for t in range(70, 80):
        out = cuflash.recurrent_gated_delta_rule(*(x[:, t : t + 1] for x in tokens), state)
        atol = 1e-5 if ITEMSIZE[dtype] == 4 else 5e-3
        np.testing.assert_allclose(out.get(), whole[:, t : t + 1].get(), atol=atol, rtol=atol)
    np.testing.assert_allclose(state.get(), last.get(), atol=atol, rtol=atol)
