"""The case matrix without its checks, to be run under compute-sanitizer: every case, dtype and kernel once.

compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/sanitize.py [--kernel NAME] [part of a name ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("CUFLASH_COMPILE", "lazy")

import cupy
from cases import CASES, DTYPES, TF32_CASES
from gated_cases import Call, arguments_of, calls

import cuflash
from cuflash.gpu.launch import device_info
from cuflash.plan.gated import GATED_KERNELS
from cuflash.plan.names import kernel_names
from cuflash.plan.table import KERNELS, KernelSpec
from cuflash.problem.arrays import DTYPES as DTYPES_BY_NAME
from cuflash.testing import Case, describe, make_data, run


def prepared_tiles(spec: KernelSpec, case: Case, dtype: str) -> list[str]:
    """A tile whose keys and values are prepared, which so small a case would not take by itself."""
    traits, device = describe(case, dtype).traits, device_info(0)
    if spec.preparing is None or spec.refusal(traits, device) is not None:
        return []
    return [str(tile) for tile in spec.tiles(traits, device) if tile.prepared][:1]


Run = tuple[str, str, str, str, Callable[[], Any]]
"""Kernel, case, dtype, tile, and what to call."""


def attention_runs() -> Iterator[Run]:
    """Every case in every dtype, by every row."""
    matrix = [(case, dtype) for case in CASES for dtype in DTYPES] + [(case, "float32") for case in TF32_CASES]
    for spec, (case, dtype) in product(KERNELS, matrix):
        for tile in ("", *prepared_tiles(spec, case, dtype)):
            yield spec.name, case.name, dtype, tile, partial(_run_case, case, dtype)


def _run_case(case: Case, dtype: str) -> None:
    run(case, make_data(case, dtype), cupy)


def gated_runs() -> Iterator[Run]:
    """Calls of the gated delta rule in every dtype, by every row."""
    for spec in GATED_KERNELS:
        for dtype in spec.dtypes:
            for call in calls(DTYPES_BY_NAME[dtype]):
                if call.op in spec.operations:
                    yield spec.name, call.name, dtype, "", partial(_run_gated, call)


def _run_gated(call: Call) -> None:
    getattr(cuflash, call.op)(**arguments_of(call, cupy))


def main() -> int:
    """Run the cases whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts of case names")
    parser.add_argument("--kernel", choices=kernel_names()[:-1], help="one row of the tables")
    arguments = parser.parse_args()
    wanted = arguments.parts
    cupy.cuda.set_allocator(None)  # an array per allocation: nothing lies behind its end that could be read unnoticed
    count = 0
    for kernel, name, dtype, tile, compute in chain(attention_runs(), gated_runs()):
        if arguments.kernel not in (None, kernel) or (wanted and not any(part in name for part in wanted)):
            continue
        with cuflash.options(kernel=kernel, tile=tile or None):
            print(f"{kernel} {name} {dtype} {tile}", flush=True)  # so that what the tool finds has a name
            try:
                compute()
                count += 1
            except ValueError as error:
                if "cannot serve this call" not in str(error):
                    raise
    print(f"ran {count} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
