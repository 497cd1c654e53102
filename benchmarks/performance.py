"""Write the stored error tables and sweeps into docs/performance.md, with their plots: python benchmarks/performance.py

The files are what `python benchmarks/gpu.py accuracy sweep --results benchmarks/results` stores.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cuflash.bench import accuracy, cases, sweep
from cuflash.bench.plot import save_errors, save_sweep
from cuflash.bench.report import Report, error_ratios, error_tables, header

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
HEAD = """\
# Errors and sweeps

`python benchmarks/performance.py` writes this page from what `python benchmarks/gpu.py accuracy sweep --results
benchmarks/results` stores. Speeds beside other libraries are in [README.md](../README.md) and the pages it names.

## Errors

{method}

| distribution | q, k and v |
|---|---|
{distributions}

Powers of ten have exponents from -d to d, those of queries from -2 d to 1 - d; d is {most}, in float16 {least}. "Far
below" is {far:g}, in float16 {near:g}. What is not mentioned is unit normal."""
METHOD = """\
Each distribution of q, k and v is drawn once, rounded to the dtype, and given to every kernel of the table that takes
the dtype and these head dimensions (so not to forward_points, for up to 16 features), to the formula as one writes it
down (`naive`, in the dtype itself and by the same library: NumPy or CuPy), and to PyTorch and cuDNN where they are
installed: one head, {queries} queries and {keys} keys. The exact result is that of the rounded arrays, in float64; for
float64 it is computed in NumPy's long double of 64 bits and more, on machines that have one. With P the exact weights,
each cell has two measures, and of each the largest over the head dimensions:

- *rms*: `sqrt(mean((got - exact)^2)) / sqrt(mean(exact^2))`, over the whole result. For `value columns` and `small
  columns`, whose columns have scales of their own, it is that of the worst column.
- *maximum*: the largest `|got - exact|_id / sum_j P_ij |v_jd|` of any element.

On a GPU kernels compute the head once alone, its keys split among many blocks, and once as {copies} equal heads, whose
keys are not split, so that sums are long; the larger error counts.

`naive` in bfloat16 computes in float32 on NumPy, whose products of bfloat16 are float32; CuPy has none."""
SWEEP = """\
Each dtype with head dimensions of {head_dims} and lengths of {lengths}, by turns of one head or of as many as fit
({scores:.1e} scores, {elements:.1e} elements of an array, {heads} heads at most), full or causal: {count} problems.
They are compared with naive CuPy and PyTorch's math back end, which keep all scores in memory. A ratio is the time of
one of them over that of cuflash: above 1, cuflash is faster."""

MISSING = "No {what} is stored: `python benchmarks/gpu.py {step} --results benchmarks/results` measures it, on a GPU."


def read(kind: str, folder: Path = RESULTS) -> dict[Path, Report]:
    """Return the stored reports of a kind, "accuracy" or "sweep", those of GPUs first."""
    reports = {path: json.loads(path.read_text()) for path in sorted((folder / kind).glob("*.json"))}
    return dict(sorted(reports.items(), key=lambda item: item[1]["backend"] != "gpu"))


def paragraph(words: str, **values: Any) -> str:
    """Fill in values, and break lines anew."""
    return textwrap.fill(words.format(**values), 120, break_on_hyphens=False)


def machine(report: Report) -> str:
    """Title, date, versions."""
    name, *rest = header(report).splitlines()
    return f"### {name}\n\nMeasured on {report['date']}: {'; '.join(rest)}."


def picture(path: Path, words: str) -> str:
    """Markdown of the plot that belongs to a stored file."""
    return f"![{words}](../{path.with_suffix('.svg').relative_to(ROOT).as_posix()})"


def errors_of(path: Path, report: Report) -> str:
    """The error table of one machine."""
    found = report["accuracy"]
    dims = ", ".join(map(str, found["head_dims"]))
    parts = [machine(report), f"Head dimensions: {dims}.", picture(path, "rms errors by distribution")]
    parts += error_tables(found).values()
    parts += [f"Not measured: {line}." for line in found["skipped"]]
    ratios = "\n".join(f"- {line}" for line in error_ratios(found))
    return "\n\n".join([*parts, f"Rms error over that of `naive`, at most:\n\n{ratios}"])


def sweep_of(path: Path, report: Report) -> str:
    """The sweep on one machine."""
    worst = "\n".join(f"- {ratio}" for ratio in sweep.ratios(report)[: sweep.WORST])
    parts = [machine(report), f"{sweep.verdict(report)}.", picture(path, "times the speed of the faster peer")]
    parts += ["The least ratio of each head dimension and length, and its dtype:", sweep.table(report)]
    parts += [f"The least of all:\n\n{worst}"]
    missing = "\n".join(f"- {line}" for line in sweep.not_measured(report))
    return "\n\n".join([*parts, *([f"Not measured:\n\n{missing}"] if missing else [])])


def text(errors: dict[Path, Report], sweeps: dict[Path, Report]) -> str:
    """The page."""
    head = HEAD.format(
        method=METHOD.format(queries=accuracy.QUERIES, keys=accuracy.KEYS, copies=max(accuracy.COPIES["gpu"])),
        distributions="\n".join(f"| {name} | {found.meaning} |" for name, found in accuracy.DISTRIBUTIONS.items()),
        most=accuracy.DECADES["float32"],
        least=accuracy.DECADES["float16"],
        far=accuracy.FAR_BELOW["float32"],
        near=accuracy.FAR_BELOW["float16"],
    )
    comparison = paragraph(
        SWEEP,
        head_dims=", ".join(map(str, cases.SWEEP_HEAD_DIMS)),
        lengths=", ".join(map(str, cases.SWEEP_LENGTHS)),
        scores=cases.SWEEP_SCORES,
        elements=cases.SWEEP_ELEMENTS,
        heads=cases.SWEEP_HEADS,
        count=len(cases.GROUPS[sweep.SWEEP]),
    )
    tables = [errors_of(path, report) for path, report in errors.items()]
    if not any(report["backend"] == "gpu" for report in errors.values()):
        tables.append(paragraph(MISSING, what="error table of a GPU", step="accuracy"))
    shown = [sweep_of(path, report) for path, report in sweeps.items()]
    missing = paragraph(MISSING, what="sweep", step="sweep")
    return "\n\n".join([head, *tables, "## The sweep", comparison, *(shown or [missing])]) + "\n"


def main() -> int:
    """Write the page and the plots."""
    errors, sweeps = read("accuracy"), read("sweep")
    for path, report in errors.items():
        save_errors(report, path.with_suffix(".svg"))
    for path, report in sweeps.items():
        save_sweep(report, path.with_suffix(".svg"))
    PAGE.write_text(text(errors, sweeps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
