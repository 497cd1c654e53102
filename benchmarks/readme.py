"""Write the stored results into README.md, its plot, and a page beside each file: python benchmarks/readme.py

The files are what `python benchmarks/gpu.py bench` stores. The README shows ten problems and one plot; the pages show
everything.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cuflash.bench.plot import save_overview
from cuflash.bench.report import CHOSEN, Report, column, markdown, rate

RESULTS = ROOT / "benchmarks" / "results"
PLOT = RESULTS / "overview.svg"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PROBLEMS = {
    "gpu": (
        "bfloat16 B4 H16 N4096 D128 causal",
        "float16 B4 H32 N4096 D64 full",
        "bfloat16 B4 H32/8 N4096 D128 causal",
        "bfloat16 B1 H32/8 N1x8192 D128 causal",
        "float32 B2 H16 N4096 D64 causal",
        "float32 B2 H8 N4096 D128 full",
        "float64 B2 H16 N4096 D64 causal",
    ),
    "numpy": (
        "float32 B1 H16 N2048 D64 full",
        "float32 B1 H16 N512 D64 full",
        "float32 B1 H16/4 N2048 D64 causal window 255,0",
    ),
}
"""Those of the README, by back end: the usual ones, whoever wins them."""
LEGEND = """\
B: batch, H: heads (of queries/of keys), N: tokens (queries x keys), D: head_dim. Errors are relative, against float64.
torch's cuDNN, flash, efficient and math are back ends of its `scaled_dot_product_attention`; cuDNN alone is called
through its own Python module, on CuPy arrays.

Everything that was measured, with versions and limits: {pages}. `python benchmarks/gpu.py bench --results
benchmarks/results` measures it again, `python benchmarks/readme.py` writes this section."""


def read_reports(folder: Path) -> dict[Path, Report]:
    """Return all stored reports, those of GPUs first."""
    reports = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return dict(sorted(reports.items(), key=lambda item: item[1]["backend"] != "gpu"))


def speeds(problem: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Results that have a speed, fastest first, by the name of who computed them."""
    results = [result for result in problem["results"] if "tflops" in result]
    return {column(result): result for result in sorted(results, key=lambda result: -result["tflops"])}


def wins(report: Report) -> str:
    """Who is the fastest how often, in a sentence."""
    found = Counter(next(iter(by_name)) for problem in report["problems"] if (by_name := speeds(problem)))
    ours = found.pop(CHOSEN, 0)
    others = "".join(f", {name} in {count}" for name, count in found.most_common())
    text = f"Of {ours + found.total()} problems on {report['device']}, cuflash is the fastest in {ours}{others}."
    orders = [list(speeds(problem)) for problem in report["problems"]]
    for name in sorted({name for order in orders for name in order if name.startswith("naive")}):
        both = [order.index(CHOSEN) > order.index(name) for order in orders if {CHOSEN, name} <= set(order)]
        text += f" It is slower than {name} in {sum(both)} of {len(both)}."
    return text


def line(report: Report, name: str) -> str:
    """Return the row of a problem; SystemExit if it was not measured."""
    problem = next((problem for problem in report["problems"] if problem["name"] == name), None)
    if problem is None or CHOSEN not in speeds(problem):
        raise SystemExit(
            f"the results of {report['device']} hold no speed of {name}: measure again, or change PROBLEMS"
        )
    by_name = speeds(problem)
    ours = by_name.pop(CHOSEN)
    cells = [report["device"].partition(",")[0], name, rate(ours), "-", "-", f"{ours['relative_error']:.1e}"]
    if by_name:
        other, result = next(iter(by_name.items()))
        cells[3:5] = f"{other}, {rate(result | {'bound': ours['bound']})}", f"{ours['tflops'] / result['tflops']:.2f}"
    return f"| {' | '.join(cells)} |"


def section(reports: dict[Path, Report]) -> str:
    """What stands between the markers: the first GPU, and the first CPU."""
    shown = [next(report for report in reports.values() if report["backend"] == backend) for backend in PROBLEMS]
    rows = [line(report, name) for report in shown for name in PROBLEMS[report["backend"]]]
    pages = ", ".join(f"[{path.stem}]({page(path).relative_to(ROOT).as_posix()})" for path in reports)
    return "\n".join(
        [
            f"![Speed against length and head_dim]({PLOT.relative_to(ROOT).as_posix()})",
            "",
            "| on | problem | cuflash | fastest other | times its speed | error |",
            "|---|---|---:|---:|---:|---:|",
            *rows,
            "",
            *map(wins, shown),
            "",
            LEGEND.format(pages=pages),
        ]
    )


def page(path: Path) -> Path:
    """Where everything of a stored file is shown."""
    return path.with_suffix(".md")


def main() -> int:
    """Replace what stands between the markers, and write the plot and the pages."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    reports = read_reports(RESULTS)
    for path, report in reports.items():
        page(path).write_text(f"# `{path.name}`\n\n{markdown(report)}\n")
    save_overview(next(iter(reports.values())), PLOT)
    readme = ROOT / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{section(reports)}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
