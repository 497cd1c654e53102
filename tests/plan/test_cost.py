"""The cost model: what it counts, that it finds its own least, and that its choices are near the best measured ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.plan import cost
from cuflash.plan.build import find_builds
from cuflash.plan.cost import (
    MAX_SPLITS,
    Lengths,
    Pace,
    Walk,
    cheapest,
    lengths_of,
    of_two_launches,
    splits_to_try,
    time_of,
    time_of_a_split,
    times_of_walking,
    walk_of,
)
from cuflash.plan.plan import make_plan
from cuflash.plan.table import KERNELS, Tile, device_of
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.settings import AUTOMATIC, Settings
from plan.test_plan import H200, dense, gpu, packed, square

ROOT = Path(__file__).resolve().parents[2]


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(0, 40), st.none() | st.integers(0, 40),
    st.integers(-70, 70), st.sampled_from([4, 8, 16, 32]), st.sampled_from([4, 16]),
)  # fmt: skip
def test_walks_are_bounds(n: int, m: int, left: Any, right: Any, offset: int, rows: int, keys: int) -> None:
    """No tile sees more keys than it is said to walk through; on average they do not see more than is said."""
    problem = dense(gpu((1, n, 8)), gpu((1, m, 8)), window=(left, right), query_offset=offset)
    walk = walk_of(lengths_of(problem), Tile(rows, keys, 32))
    position, key = offset + np.arange(n)[:, np.newaxis], np.arange(m)
    visible = np.ones((n, m), bool)
    if left is not None:
        visible &= key >= position - left
    if right is not None:
        visible &= key <= position + right
    seen = [int(visible[i : i + rows].any(0).sum()) for i in range(0, n, rows)]
    assert walk.num_tiles == len(seen) and 0 <= walk.average <= 1
    assert max(seen, default=0) <= walk.num_steps * keys < m + keys
    if left is None and n % rows == 0 and n:
        assert np.mean(seen) <= walk.average * walk.num_steps * keys + 1e-9


@given(st.integers(0, 10**7))
def test_lengths_are_rounded_up_a_little(length: int) -> None:
    def rounded(length: int) -> int:
        queries, group_size, num_planes, keys, later_keys, width, all_keys = cost.rounded(
            Lengths(length, 3, 17, length, length, 99, length)
        )
        assert (group_size, num_planes, width) == (3, 17, 99) and queries == keys == later_keys == all_keys
        return queries

    found = rounded(length)
    assert length <= found <= length + min(63, length / 8)
    assert rounded(found) == found and rounded(length + 1) >= found
    assert length >= 16 or found == length


def test_lengths() -> None:
    """What of a problem decides: keys within windows, sequences on average, heads of a group."""
    assert lengths_of(square("float16", 64, 512)) == Lengths(512, 1, 64, 512, 0, None, 512)
    assert lengths_of(square("float16", 64, 512, causal=True)) == Lengths(512, 1, 64, 512, 511, None, 512)
    assert lengths_of(square("float16", 64, 512, window=(63, 0))) == Lengths(512, 1, 64, 512, 511, 64, 512)
    decode = dense(gpu((2, 8, 1, 64)), gpu((2, 2, 1024, 64)), causal=True)
    assert lengths_of(decode) == Lengths(1, 4, 16, 1024, 0, None, 1024)
    assert lengths_of(dense(gpu((1, 8, 64)), gpu((1, 8, 64)), query_offset=-9, causal=True)).keys == 0
    last = dense(gpu((2, 8, 1, 64)), gpu((2, 2, 1024, 64)), window=(9, 0))
    assert lengths_of(last)[3:] == (10, 0, 10, 1024), "but all keys would be made ready"
    assert lengths_of(packed(4, 256, 8, 2, 64, "float16", causal=True)) == Lengths(64, 4, 32, 64, 63, None, 64)


def test_heads_share_a_tile_that_one_does_not_fill() -> None:
    lengths = Lengths(5, 8, 32, 100, 0, None)
    assert walk_of(lengths, Tile(16, 64, 32)).num_tiles == 3 * 4
    assert walk_of(lengths, Tile(4, 64, 32)).num_tiles == 2 * 32


def test_causal_tiles_see_half_of_the_keys_and_half_a_tile() -> None:
    average = (1024 + 64) / 2048
    assert walk_of(Lengths(1024, 1, 1, 1024, 1023, None), Tile(64, 64, 128)) == Walk(16, 16, average, 1024, 16, average)
    assert walk_of(Lengths(1024, 1, 3, 1024, 0, None), Tile(64, 64, 128)) == Walk(48, 16, 1.0, 3072, 32)


@pytest.mark.parametrize(("rows", "keys"), [(192, 128), (192, 80), (192, 112), (64, 128), (16, 64), (128, 96)])
def test_causal_tiles_that_end_in_the_middle_of_one_of_keys_walk_through_all_of_it(rows: int, keys: int) -> None:
    length = rows * keys  # so that tiles end at all the places where they can
    walk = walk_of(Lengths(length, 1, 1, length, length - 1, None), Tile(rows, keys, 128))
    steps = [-(-end // keys) for end in range(rows, length + 1, rows)]
    assert walk.num_steps == max(steps)
    assert walk.average * walk.num_steps == pytest.approx(np.mean(steps))
    assert walk.of_pairs * walk.num_steps == pytest.approx(np.mean(steps))


def test_pairs_of_a_window_are_not_alike() -> None:
    """Some have two tiles that see all of it; where it is half of the keys and more each has one that does not."""
    tile = Tile(64, 64, 128, 2, walks_on=True)
    short = walk_of(Lengths(1024, 1, 2, 1024, 1023, 257), tile)
    assert short.num_steps == 5 and short.of_pairs == 1 and 0.87 < short.average < 0.88
    long = walk_of(Lengths(1024, 1, 2, 1024, 1023, 769), tile)
    assert long.average < 0.63 < 0.65 < long.of_pairs < 0.66
    times = [times_of_walking(PACE._replace(tile=tile), walk, 4)[1] for walk in (short, long)]
    assert times == pytest.approx([2 - 0.5 + 2 * 2 * (0.5 + share * 1.5) for share in (5, 13 * long.of_pairs)])


PACE = Pace(Tile(64, 64, 128, 2), 2.0, (1.0, 1.5), MAX_SPLITS, 2, (0.0, 0.0), 0.0, 0.5, 1.25, 1.0, 0.0)


@pytest.mark.parametrize(
    ("num_tiles", "splits", "expected"),
    [
        (100, 1, 2 + 8 * 1.0),
        (132, 1, 2 + 8 * 1.0),
        (133, 1, 2 + 8 * 1.5),
        (66, 4, 2 + 2 * 1.5),
        (265, 1, (2 + 8 * 1.5) + (2 + 8 * 1.0)),
        (265, 8, 8 * (2 + 1.5) + (2 + 1.0)),
        (0, 1, 2 + 8 * 1.0),
    ],
)
def test_blocks_come_in_waves(num_tiles: int, splits: int, expected: float) -> None:
    assert time_of(PACE, Walk(num_tiles, 8, 1.0, 512), 132, splits) == pytest.approx(expected)


def test_fewer_blocks_with_partial_results_share_a_multiprocessor() -> None:
    """Splits fill the places that these have: one more for each tile would be a second wave."""
    pace, walk = PACE._replace(times=(1.0, 1.5, 2.0), split_blocks=2), Walk(66, 64, 1.0, 10**5)
    assert time_of(pace, walk, 132, 4) == pytest.approx(2 + 16 * 1.5)
    assert time_of(pace, walk, 132, 6) == pytest.approx((2 + 11 * 1.5) + (2 + 11 * 1.0))
    assert list(splits_to_try(pace, walk, 1e-3, 132))[1:] == [4, 8, 16, 32]
    build = find_builds(square("float16", 64).traits, H200, Settings("forward_wgmma", "64x64x2", False))[0]
    assert build.resident_blocks(0, False) == 4 * 132 and build.resident_blocks(0, True) == 3 * 132


def test_memory_is_a_limit() -> None:
    """However many blocks share the work, each key is read once. It takes more where both limits are equally near."""
    pace = PACE._replace(stream=0.001)
    for splits in 1, 4:
        assert time_of(pace, Walk(264, 8, 1.0, 10**5), 132, splits) == pytest.approx(2 + 100, rel=1e-4)
    assert time_of(pace, Walk(132, 8, 1.0, 8000), 132, 1) == pytest.approx(2 + 8 * 2**0.2)


def test_blocks_walk_on_where_there_are_many_tiles() -> None:
    """In place of four waves of all blocks; one wave is there already."""
    pace = PACE._replace(tile=PACE.tile._replace(walks_on=True))
    many, one = Walk(4 * 264, 8, 1.0, 512, 2 * 264), Walk(264, 8, 1.0, 512, 132)
    assert time_of(pace, many, 132, 1) == pytest.approx(2 - 0.5 + 4 * (0.5 + 8 * 1.5))
    assert time_of(pace, many, 132, 1) < time_of(PACE, many, 132, 1)
    assert time_of(pace, one, 132, 1) > time_of(PACE, one, 132, 1)


def test_blocks_walk_by_tiles_or_by_pairs() -> None:
    """Pairs are alike where tiles differ. Where these do not, three tiles to a block are fewer than two pairs."""
    pace = PACE._replace(tile=PACE.tile._replace(walks_on=True))
    for average in (1.0, 0.5):
        by_tiles, by_pairs = times_of_walking(pace, Walk(3 * 264, 8, average, 512, 3 * 132, average), 132)
        assert by_tiles == pytest.approx(2 - 0.5 + 3 * (0.5 + 8 * 1.5 * 1.25))
        assert by_pairs == pytest.approx(2 - 0.5 + 4 * (0.5 + 8 * 1.5 * average))
        assert (by_pairs < by_tiles) == (average < 1)


def test_blocks_of_different_lengths_drift_apart() -> None:
    """The longest one decides, alone in the end; where there are many, less than whole waves of them do."""
    assert time_of(PACE, Walk(264, 8, 0.5, 512), 132, 1) == pytest.approx(2 + 8 * (0.5 * 1.5 + 0.5 * 1.0))
    wave = 2 + 8 * 0.5 * 1.5
    assert 1.1 * wave < time_of(PACE, Walk(290, 8, 0.5, 512), 132, 1) < time_of(PACE, Walk(290, 8, 1.0, 512), 132, 1)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 5000), st.sampled_from([1, 4]), st.integers(1, 600), st.integers(0, 10**5), st.booleans(),
    st.sampled_from([1, MAX_SPLITS]), st.sampled_from([64, 256]),
)  # fmt: skip
def test_the_least_is_found(
    queries: int, group: int, groups: int, keys: int, causal: bool, most: int, head_dim: int
) -> None:
    """No tile takes less without splits, or with any number of them that fills the GPU; none is left without keys."""
    build = find_builds(square("float16", head_dim).traits, H200, AUTOMATIC)[0]
    later = min(keys, queries) if causal else 0
    lengths = Lengths(queries, group, group * groups, keys, later, None)
    paces = [pace._replace(most_splits=most) for pace in build._paces]
    choice = cheapest(paces, build._cost, lengths, head_dim, 132)
    steps = walk_of(lengths, build.tiles[choice.tile_idx]).num_steps
    assert 1 <= choice.num_splits <= most
    assert choice.num_splits == 1 or (choice.num_splits - 1) * -(-steps // choice.num_splits) < steps
    for pace in paces:
        walk = walk_of(lengths, pace.tile)
        assert choice.time <= time_of(pace, walk, 132, 1) * (1 + 1e-9)
        full = pace.split_blocks * 132 // max(walk.num_tiles, 1)
        saved = walk.num_steps * pace.times[pace.split_blocks - 1]
        enough = (saved / time_of_a_split(build._cost, lengths, head_dim)) ** 0.5
        if 1 < full <= min(most, walk.num_steps, enough):
            time = time_of(pace, walk, 132, full) + build._cost.merge
            time += full * time_of_a_split(build._cost, lengths, head_dim)
            assert choice.time <= of_two_launches(time) * (1 + 1e-9)


def test_splits_are_for_few_rows_and_many_keys() -> None:
    assert make_plan(square("float16", 64), H200, AUTOMATIC).num_splits == 1
    decode = dense(gpu((1, 8, 1, 128)), gpu((1, 8, 65536, 128)))
    assert make_plan(decode, H200, AUTOMATIC).num_splits > 12
    assert make_plan(dense(gpu((1, 8, 1, 128)), gpu((1, 8, 100, 128))), H200, AUTOMATIC).num_splits == 1
    assert make_plan(decode._replace(window_left=100, window_right=0), H200, AUTOMATIC).num_splits == 1
    long = packed(1, 1, 8, 8, 64, "float16")._replace(seqlen_k=99999)
    assert make_plan(long, H200, AUTOMATIC).num_splits == 1, "a captured call could be given no workspace"


def test_choices_are_near_the_best_measured_ones() -> None:
    """Of problems of all kernels, as `python benchmarks/fit_cost.py` prints it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import fit_cost

    found = fit_cost.read(fit_cost.STORED, H200)
    assert len(found) >= 150
    unmeasured = {spec.name for spec in KERNELS} - {one.case.kernel for one in found}
    assert not unmeasured, f"CONTRIBUTING.md, Add a kernel: no problems of {unmeasured} are measured in cost.json"
    for name, those in fit_cost.losses(found, H200).items():
        values = [loss for loss, *_ in those]
        large = {"precise_float32, tf32": 0.33, "forward_wmma, tf32": 0.32}
        large |= {"forward_scalar": 0.52, "forward_scalar, float64": 0.53, "precise_float32": 0.38}
        large |= {"forward_mma, two warps to a row": 0.36, "forward_wgmma": 0.36, "precise_wide": 0.36}
        worst = {"among kernels": 0.49, **large}.get(name, 0.2)
        assert np.mean(values) <= 0.04 and max(values) <= worst, name


def test_pages_cost_the_kernel_that_waits_for_them() -> None:
    """Many short caches, which forward_mma would have by what it takes for contiguous ones."""
    pages = gpu((64 * 32, 32, 16, 128))
    paged, _ = describe_kv_cache(gpu((64, 32, 1, 128)), pages, pages, seqlens_k=500, page_table=gpu((64, 32), "int32"))
    assert make_plan(paged, H200, AUTOMATIC).kernel != "forward_mma"


def test_few_queries_of_float64_go_to_tiles_of_few_rows() -> None:
    assert make_plan(square("float64", 64), H200, AUTOMATIC).kernel == "precise_float64"
    few = dense(gpu((8, 32, 1, 128), "float64"), gpu((8, 8, 1024, 128), "float64"))
    plan = make_plan(few, H200, AUTOMATIC)
    assert plan.kernel == "precise_wide" and plan.tile.block_m <= 16


def test_float32_goes_to_the_kernel_that_takes_less() -> None:
    assert make_plan(square("float32", 64), H200, AUTOMATIC).kernel == "precise_wgmma"
    assert make_plan(square("float32", 64), device_of(80), AUTOMATIC).kernel == "precise_float32"
    few = dense(gpu((8, 32, 1, 128), "float32"), gpu((8, 8, 4096, 128), "float32"))
    assert make_plan(few, H200, AUTOMATIC).kernel == "precise_decode"
    assert make_plan(few, H200, Settings("precise_float32", "", False)).kernel == "precise_float32"
