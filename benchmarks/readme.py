"""Write the results into README.md, and all of them into a page beside each file: python benchmarks/readme.py

The files are what `python -m cuflash bench --json benchmarks/results/NAME.json` stores; all of them are shown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cuflash.bench.report import markdown

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


INTRODUCTION = """\
Written by `python benchmarks/readme.py` from what `python -m cuflash bench` measured: TFLOP/s (2 (D + Dv) operations
for each visible pair), or GB/s where moving the arrays is the limit, and the relative error against float64."""


def shown(problem: dict[str, Any]) -> bool:
    """Whether a problem is in the README: of the 16-bit groups, which are long, a part."""
    if problem["group"] not in ("float16", "bfloat16"):
        return True
    return problem["head_dim"] in (64, 128, 256) and problem["seqlen_q"] in (4096, 16384)


def section(path: Path, report: dict[str, Any]) -> str:
    """Tables of one stored measurement."""
    page = path.with_suffix(".md").relative_to(ROOT).as_posix()
    left_out = len(report["problems"]) - sum(map(shown, report["problems"]))
    more = f"\n\n{left_out} further problems of this run are in [{page}]({page})." if left_out else ""
    return markdown(report, shown) + more


def main() -> int:
    """Replace what stands between the markers, and write the pages."""
    reports = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    sections = [INTRODUCTION]
    for path, report in sorted(reports.items(), key=lambda item: item[1]["backend"] != "gpu"):
        sections.append(section(path, report))
        path.with_suffix(".md").write_text(f"# `{path.name}`\n\n{markdown(report)}\n")
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    results = "\n\n".join(sections)
    readme.write_text(f"{before}{BEGIN}\n{results}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
