"""The case matrix without its checks, to be run under compute-sanitizer: every case, dtype and kernel row once.

compute-sanitizer --tool racecheck --error-exitcode 1 python benchmarks/sanitize.py [--kernel NAME] [part of a name ...]
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("CUFLASH_COMPILE", "lazy")

import cupy
from cases import CASES, DTYPES, TF32_CASES

import cuflash
from cuflash.gpu.launch import device_info
from cuflash.plan.table import KERNELS, KernelSpec
from cuflash.testing import Case, describe, make_data, run


def prepared_tiles(spec: KernelSpec, case: Case, dtype: str) -> list[str]:
    """A tile whose keys and values are prepared, which so small a case would not take by itself."""
    if spec.preparing is None or dtype not in spec.dtypes:
        return []
    return [str(tile) for tile in spec.tiles(describe(case, dtype).traits, device_info(0)) if tile.prepared][:1]


def main() -> int:
    """Run the cases whose names contain one of the arguments, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="parts of case names")
    parser.add_argument("--kernel", choices=[spec.name for spec in KERNELS], help="one row of the table")
    arguments = parser.parse_args()
    wanted = arguments.parts
    calls = [(case, dtype) for case in CASES for dtype in DTYPES] + [(case, "float32") for case in TF32_CASES]
    cupy.cuda.set_allocator(None)  # an array per allocation: nothing lies behind its end that could be read unnoticed
    count = 0
    for spec, (case, dtype) in product(KERNELS, calls):
        if arguments.kernel not in (None, spec.name) or (wanted and not any(part in case.name for part in wanted)):
            continue
        for tile in ("", *prepared_tiles(spec, case, dtype)):
            with cuflash.options(kernel=spec.name, tile=tile or None):
                print(f"{spec.name} {case.name} {dtype} {tile}", flush=True)  # so that what the tool finds has a name
                try:
                    run(case, make_data(case, dtype), cupy)
                    count += 1
                except ValueError as error:
                    if "cannot serve this call" not in str(error):
                        raise
    print(f"ran {count} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
