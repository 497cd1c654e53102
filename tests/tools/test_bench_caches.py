"""Caches in `python -m cuflash bench`: their table, their gate, and what other libraries are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuflash.bench import command as bench
from cuflash.bench.caches import CacheCase
from cuflash.bench.cases import GROUPS
from cuflash.bench.check import check
from cuflash.bench.exact import exact_result
from cuflash.bench.inputs import make_inputs, stand_ins
from cuflash.bench.measure import compute
from cuflash.plan.plan import make_plan
from cuflash.plan.table import device_of
from cuflash.problem.describe_cache import describe_kv_cache
from cuflash.settings import AUTOMATIC

PEERS = str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers.py")
CASES = [
    CacheCase("", "float32", (70, 70), 4, 2, 16),
    CacheCase("", "float32", (70, 9, 33, 70, 1), 4, 2, 16, known=False),
    CacheCase("", "float32", (70, 70), 4, 2, 16, 8),
    CacheCase("", "float32", (70, 9), 4, 2, 16, 8, known=False, appends=True),
    CacheCase("", "float32", (70,), 4, 1, 16, appends=True),
]


def table() -> list[CacheCase]:
    return [case for case in GROUPS["caches"] if isinstance(case, CacheCase)]


@pytest.mark.parametrize("case", table(), ids=lambda case: case.name)
def test_every_case_is_a_valid_call(case: CacheCase) -> None:
    problem, _ = describe_kv_cache(**stand_ins(case), **case.options)
    assert make_plan(problem, device_of(90), AUTOMATIC).num_blocks > 0 and case.flops > 0 and case.bytes > 0


def test_the_table_has_pages_beside_contiguous_caches_and_one_long_among_short() -> None:
    found = {(case.page_size, case.known) for case in table()}
    assert {(0, True), (0, False), (64, True), (16, True), (64, False)} <= found
    assert {case.head_dim for case in table()} == {64, 128, 256}
    assert any(max(case.lengths) > 30 * min(case.lengths) for case in table())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gate_lets_right_results_pass_and_no_others(case: CacheCase) -> None:
    inputs = make_inputs(case, np)
    exact, results = exact_result(inputs), inputs.new_results(np)
    compute(inputs, results)
    assert check(exact, results, np).good
    place = len(case.lengths) - 1, 0, 0, 3
    results["out"][place] += 1e-3
    assert not check(exact, results, np).good
    results["out"][0, 0, 0, 0] = np.nan
    assert not check(exact, results, np).good


def test_bytes_are_those_in_use() -> None:
    even, uneven = CASES[0], CASES[1]
    beside = 2 * 2 * 4 * 16 * 4
    assert even.bytes == 2 * 140 * 2 * 16 * 4 + beside
    assert uneven.bytes == 2 * 183 * 2 * 16 * 4 + 5 * 2 * 4 * 16 * 4 + 5 * 4


def test_peers_have_their_own_table() -> None:
    found = bench.load_peers(PEERS, "numpy")
    assert found.of(CASES[0]) is found.caches and found.caches == {}
