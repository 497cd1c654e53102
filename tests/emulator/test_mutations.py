"""Every guard and every barrier of the CUDA sources is missed by one of a few calls.

`mutants.py` finds them in the sources, without a list, and `calls.py` has the calls. A kernel is compiled once for a
call, with all mutants in it. Running it as it is shows which of them the call comes by, and where they would differ;
those then run one at a time, until a call has noticed them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path

import pytest

from cuflash.gpu.compile import source_folder
from cuflash.plan.gated import GATED_KERNELS, GatedSpec
from cuflash.plan.table import HELPERS, KERNELS, KernelSpec
from emulator.calls import CALLS
from emulator.emulator import Emulator, choose_mutant, compiler, modified_sources, reached_mutants
from emulator.gated_calls import back_end_of, calls_of
from emulator.mutants import Mutant, instrument

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++) to run CUDA sources with")

MUTANTS: list[Mutant] = []
SOURCES: dict[str, str] = {}
for _path in sorted([*source_folder().glob("*.cu"), *source_folder().glob("*/*.cuh")]):
    if _path.parent.name != "ptx":
        _file = _path.relative_to(source_folder()).as_posix()
        SOURCES[_file], _mutants = instrument(_path.read_text(), _file, len(MUTANTS))
        MUTANTS += _mutants

SHARED = "shared"
Row = KernelSpec | GatedSpec
ROWS: tuple[Row, ...] = (*KERNELS, *GATED_KERNELS)
GROUPS = [*(spec.name for spec in ROWS), SHARED]
"""Kernels, with the headers that they alone include, and all other sources."""


@lru_cache
def included_by(file: str) -> frozenset[str]:
    """A source and all headers that it includes."""
    headers = re.findall(r'#include "([^"]+)"', (source_folder() / file).read_text())
    return frozenset({file}.union(*(included_by(header) for header in headers if header in SOURCES)))


def _sources_of(spec: Row) -> list[str]:
    """Names of a row's own source and of those of launches before it."""
    if isinstance(spec, GatedSpec):
        return [spec.name, *([spec.preparing, "gated_chain"] if spec.preparing else [])]
    return [spec.name, *([spec.preparing.name] if spec.preparing else [])]


@lru_cache
def users_of(file: str) -> tuple[Row, ...]:
    """Rows that a source is a part of; all of them for what launches beside those of rows are made of."""
    users = [spec for spec in ROWS if any(file in included_by(f"{name}.cu") for name in _sources_of(spec))]
    beside = any(file in included_by(f"{name}.cu") for name in HELPERS)
    return ROWS if beside or not users else tuple(users)


def group_of(file: str) -> str:
    users = users_of(file)
    return users[0].name if len(users) == 1 else SHARED


def runs_of(spec: Row, sources: Path) -> list[Callable[[], None]]:
    """Calls of a row with changed sources."""
    if isinstance(spec, GatedSpec):
        return [partial(call, back_end_of(spec, sources)) for call in calls_of(spec)]
    return [partial(_call_anew, call, spec.name, sources) for call in CALLS.values()]


def _call_anew(call: Callable[[Emulator], None], kernel: str, sources: Path) -> None:
    call(Emulator(kernel, sources=sources))


def notice(mutants: dict[int, Mutant], run: Callable[[], None]) -> set[int]:
    """Delete from `mutants` those that a call notices; return the numbers of all that it comes by."""
    choose_mutant(None)
    try:
        run()
    except pytest.skip.Exception:
        return set()
    except ValueError as error:
        if "cannot serve this call" not in str(error):
            raise
        return set()
    reached = reached_mutants()
    max_steps = 10 * choose_mutant(None) + 10**6
    for number in [number for number in mutants if reached.get(number)]:
        if number not in mutants:
            continue
        choose_mutant(number, max_steps)
        try:
            run()
        except AssertionError:
            noticed = mutants.pop(number, None)
            if noticed and noticed.instead is not None:
                mutants.pop(noticed.instead, None)
        finally:
            choose_mutant(None)
    return set(reached)


def unnoticed(mutants: dict[int, Mutant], rows: Iterable[Row], sources: Path) -> list[str]:
    """What is left of `mutants` after all calls of the rows, of those that have them in their sources."""
    reached = set()
    for spec in rows:
        for run in runs_of(spec, sources):
            if any(spec in users_of(mutant.file) for mutant in mutants.values()):
                reached |= notice(mutants, run)
    return [f"{mutant}{'' if number in reached else ' (no call comes by)'}" for number, mutant in mutants.items()]


AT_ONCE = 12
"""Mutants of a test: calls of some kernels take long."""
MEMBERS = {group: [mutant for mutant in MUTANTS if group_of(mutant.file) == group] for group in GROUPS}
TURNS = [(group, first) for group, members in MEMBERS.items() for first in range(0, len(members), AT_ONCE)]


@pytest.mark.share(len(TURNS))
@pytest.mark.parametrize("turn", range(len(TURNS)), ids=[f"{group}-{first}" for group, first in TURNS])
def test_every_mutant_is_noticed(turn: int, pytestconfig: pytest.Config) -> None:
    group, first = TURNS[turn]
    members = MEMBERS[group][first : first + AT_ONCE]
    # One of a pair is noticed in place of the other.
    members += [MUTANTS[mutant.instead] for mutant in members if mutant.instead is not None]
    mutants = {mutant.number: mutant for mutant in members}
    # The one that takes everything and compiles soonest is the last in the table.
    rows = [*reversed(KERNELS), *GATED_KERNELS] if group == SHARED else [row for row in ROWS if row.name == group]
    # Kernels with all mutants in them serve all turns, those with few compile and run in less than half of the time.
    files = SOURCES if pytestconfig.getoption("thorough") else {mutant.file for mutant in members}
    left = unnoticed(mutants, rows, modified_sources({file: SOURCES[file] for file in sorted(files)}))
    assert not left, "\n".join(["nobody misses", *left])


def test_mutants_are_found() -> None:
    barriers = [mutant for mutant in MUTANTS if mutant.change == "nothing"]
    assert len(MUTANTS) > 300 and len(barriers) > 30
    for spec in ROWS:
        assert any(mutant.file == f"{spec.name}.cu" for mutant in barriers), f"{spec.name} has no barrier?"


SAMPLE = """
void f(int row, int n, const char* address) {
    constexpr int kLength = kWide < 3 ? 1 : 2;
    if constexpr (kWide && kTall) __syncwarp();  // fence: for the compiler
    if (row >= n) return;
    if (address && row % 2 == 0) use(min(row, n - 1), kWide < 3);
    const int place = row < kLength ? 0 : divide(row, n);  // right either way: 0 is what the division gives
    for (int i = 0; i < n; ++i) cp_async_wait_group<kWide == 1 ? 2 : 1>();
    for (int i = 0; i < kLength; ++i) address += i;
    view.warp.wait();
    store(row < n ? address : nullptr);
}
"""


def test_what_becomes_a_mutant() -> None:
    _, found = instrument(SAMPLE, "sample.cu", 0)
    assert [(mutant.text, mutant.change) for mutant in found] == [
        ("row >= n", "false"),
        ("address", "true"),
        ("row % 2 == 0", "true"),
        ("min(", "the first of min(row, n - 1)"),
        ("min(", "the second of min(row, n - 1)"),
        ("row < kLength", "true"),
        ("row < kLength", "false"),
        ("i < n", "i < n + 1"),
        ("cp_async_wait_group<kWide == 1 ? 2 : 1>();", "nothing"),
        ("view.warp.wait();", "nothing"),
        ("row < n", "true"),
        ("row < n", "false"),
    ]
    assert [mutant.instead for mutant in found if mutant.text == "row < kLength"] == [6, 5]
