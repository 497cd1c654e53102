"""How the results of `python -m cuflash bench` are shown: lines on the terminal, Markdown tables, a summary.

Everything here reads the plain data that `--json` stores, so that tables can be made again from a stored file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

Report = dict[str, Any]
"""What `--json` stores: backend, device, versions, limits, problems (see `measure`), overheads, notes."""
NOT_FINITE = "not finite"
"""Why there is no error of a result that has NaN or infinite elements."""
CHOSEN = "cuflash"
"""Column of the kernels that were chosen automatically."""


def number(value: float) -> str:
    """A speed: one digit behind the point, three where there is nothing before it."""
    return f"{value:.1f}" if value >= 1 else f"{value:.3f}"


def rate(result: dict[str, Any]) -> str:
    """Speed with its unit: GB/s where memory is the limit."""
    return f"{result['gbs']:.0f} GB/s" if result.get("bound") == "memory" else f"{number(result['tflops'])} TFLOP/s"


def column(result: dict[str, Any]) -> str:
    """Name of what was measured."""
    return str(result.get("peer") or (CHOSEN if result.get("automatic") else result["kernel"]))


def trouble(result: dict[str, Any]) -> str | None:
    """Return why there is no speed, or None."""
    for reason, words in (("wrong", "WRONG: "), ("failed", "FAILED: "), ("refused", "not measured: ")):
        if reason in result:
            return words + str(result[reason])
    return None


def drift_ratio(result: dict[str, Any]) -> float | None:
    """Error in units of that of rounding the exact result; None where that is not known, or 0 as in float64."""
    return result["relative_error"] / result["rounding_error"] if result.get("rounding_error") else None


def header(report: Report) -> str:
    """Machine, versions and limits."""
    versions = ", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items())
    lines = [f"{report['device']} ({report['backend']} back end)", versions]
    limits = report.get("limits")
    if limits:
        products = ", ".join(f"{dtype} {number(speed)}" for dtype, speed in limits["gemm_tflops"].items())
        lines.append(f"limits: matrix product, TFLOP/s: {products}; copy {limits['copy_gbs']:.0f} GB/s")
    return "\n".join(line for line in lines if line)


def block(problem: dict[str, Any]) -> str:
    """Lines of one problem."""
    lines = [problem["name"]]
    for result in problem["results"]:
        name = result.get("peer") or f"{result['kernel'] or 'automatic choice'} {result.get('tile', '')}".strip()
        reason = trouble(result)
        parts = [reason] if reason else [rate(result)]
        if "fraction_of_limit" in result:
            limit = "copy" if result["bound"] == "memory" else "matrix product"
            parts.append(f"{result['fraction_of_limit']:.0%} of {limit}")
            parts.append(f"{1e3 * result['seconds']:.4g} ms")
            parts.append(f"{result['ns_per_token']:.1f} ns/token")
        if "relative_error" in result:
            ratio = drift_ratio(result) if problem.get("value_mean") else None
            parts.append(f"MSE {result['mse']:.1e}")
            parts.append(f"relative error {result['relative_error']:.1e}")
            if ratio is not None:
                parts[-1] += f" ({ratio:.2f} x rounding)"
        lines.append(f"  {name:<22} {' | '.join(parts)}")
        if "plan" in result:
            lines.append(f"    plan: {result['plan']}")
    return "\n".join(lines)


def columns(problems: list[dict[str, Any]]) -> list[str]:
    """What was measured in any of the problems, kernels first."""
    results = [result for problem in problems for result in problem["results"] if "tflops" in result]
    results.sort(key=lambda result: "peer" in result)
    return list(dict.fromkeys(map(column, results)))


def _line(problem: dict[str, Any], names: list[str], drift: bool) -> str:
    by_name = {column(result): result for result in problem["results"]}
    ours = [result for result in problem["results"] if "peer" not in result]
    memory = any(result.get("bound") == "memory" for result in ours)
    cells = []
    for name in names:
        result = by_name.get(name, {})
        if "tflops" not in result:
            cells.append("wrong" if "wrong" in result else "failed" if "failed" in result else "-")
        else:
            cells.append(f"{result['gbs']:.0f} GB/s" if memory else number(result["tflops"]))
    fractions = [result["fraction_of_limit"] for result in ours if "fraction_of_limit" in result]
    errors = [result["relative_error"] for result in ours if "relative_error" in result]
    cells.append(f"{max(fractions):.0%}" if fractions else "-")
    cells.append(f"{max(errors):.1e}" if errors else "-")
    if drift:
        ratios = [ratio for result in ours if (ratio := drift_ratio(result)) is not None]
        cells.append(f"{max(ratios):.2f}" if ratios else "-")
    return f"| {problem['name']} | " + " | ".join(cells) + " |"


def table(problems: list[dict[str, Any]]) -> str:
    """Markdown: a line per problem, the speed of each kernel and peer, the fraction of the limit, the error."""
    names = columns(problems)
    drift = any(problem.get("value_mean") for problem in problems)
    titles = ["problem, TFLOP/s", *names, "of limit", "relative error", *(["error / rounding"] if drift else [])]
    lines = ["| " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(titles) - 1)]
    lines += [_line(problem, names, drift) for problem in problems]
    # A column that nothing was measured for says nothing.
    if not any("fraction_of_limit" in result for problem in problems for result in problem["results"]):
        lines = [_without(line, titles.index("of limit")) for line in lines]
    return "\n".join(lines)


def _without(line: str, index: int) -> str:
    cells = line.strip("|").split("|")
    del cells[index]
    return "|" + "|".join(cells) + "|"


def _least_and_median(times: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in times)


def overhead_tables(found: dict[str, Any]) -> str:
    """Markdown of what calls cost beside their kernels."""
    tables = []
    if "calls_us" in found:
        news = list(next(iter(found["calls_us"].values())))
        lines = ["| host time per call, microseconds: least, median | " + " | ".join(news) + " |"]
        lines.append("|---|" + "---:|" * len(news))
        lines += [
            f"| {name} | " + " | ".join(_least_and_median(times[new]) for new in news) + " |"
            for name, times in found["calls_us"].items()
        ]
        tables.append("\n".join(lines))
    parts: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
        ("others_us", "host time for comparison, microseconds: least, median", _least_and_median),
        ("import_s", "`import cuflash` above its array library, seconds", lambda value: f"{value:.2f}"),
        ("memory_mib", "memory beside inputs and results, MiB", lambda value: f"{value:.1f}"),
    )
    for name, title, text in parts:
        if name in found:
            rows = [f"| {key} | {text(value)} |" for key, value in found[name].items()]
            tables.append("\n".join([f"| {title} | |", "|---|---:|", *rows]))
    if "compile" in found:
        lines = ["| compiling a kernel | tile | GPU | processor seconds | registers | spilled bytes |"]
        lines.append("|---|---|---|---:|---:|---:|")
        lines += [
            f"| {row['kernel']}, {row['dtype']}, D {row['head_dim']}, causal | {row['tile']} | {row['arch']} "
            f"| {row['seconds']:.2f} | {row['registers']} | {row['spill_bytes']} |"
            for row in found["compile"]
        ]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _error_cell(results: list[dict[str, Any]]) -> str:
    """The two errors of one column, the largest over head dimensions."""
    if any(result.get("refused") == NOT_FINITE for result in results):
        return NOT_FINITE
    measured = [result for result in results if "rms" in result]
    return " / ".join(f"{max(r[name] for r in measured):.1e}" for name in ("rms", "maximum")) if measured else "-"


def error_column(result: dict[str, Any]) -> str:
    """Name of what an error was measured of."""
    return column(result) + (", tf32" if result.get("precision") == "tf32" else "")


def error_tables(found: dict[str, Any]) -> dict[str, str]:
    """Markdown of the error table by dtype: a line per distribution, of each kernel and peer `rms / maximum`."""
    tables = {}
    for dtype in dict.fromkeys(row["dtype"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["dtype"] == dtype]
        # Who serves no call of the dtype says nothing.
        measured = (
            result for row in rows for result in row["results"] if result.get("refused", NOT_FINITE) == NOT_FINITE
        )
        names = list(dict.fromkeys(map(error_column, measured)))
        lines = [f"| {dtype}: rms / maximum | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
        for distribution in dict.fromkeys(row["distribution"] for row in rows):
            found_here = [r for row in rows if row["distribution"] == distribution for r in row["results"]]
            cells = [_error_cell([result for result in found_here if error_column(result) == name]) for name in names]
            lines.append(f"| {distribution} | {' | '.join(cells)} |")
        tables[dtype] = "\n".join(lines)
    return tables


def markdown(report: Report, keep: Callable[[dict[str, Any]], bool] = lambda problem: True) -> str:
    """The whole report as Markdown, a table for each group.

    Parameters
    ----------
    report : dict
        What `--json` stores.
    keep : callable, optional
        Says of a problem whether it is shown.
    """
    # Two spaces end a line of Markdown.
    parts = [header(report).replace("\n", "  \n")]
    problems = list(filter(keep, report["problems"]))
    for group in dict.fromkeys(problem["group"] for problem in problems):
        parts.append(f"**{group}**")
        parts.append(table([problem for problem in problems if problem["group"] == group]))
    if "overheads" in report:
        parts.append(overhead_tables(report["overheads"]))
    if "accuracy" in report:
        parts += error_tables(report["accuracy"]).values()
    return "\n\n".join(parts + report.get("notes", []))


def bad(problem: dict[str, Any]) -> bool:
    """Whether a kernel is wrong or failed."""
    return any("wrong" in result or "failed" in result for result in problem["results"])


def error_ratios(found: dict[str, Any]) -> list[str]:
    """For each dtype, how far everyone's rms error is from that of the naive formula at the worst, a line each."""
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in found["rows"]):
        worst: dict[str, tuple[float, str]] = {}
        for row in (row for row in found["rows"] if row["dtype"] == dtype):
            rms = {error_column(result): result["rms"] for result in row["results"] if "rms" in result}
            naive = rms.pop("naive", None)
            for name, value in rms.items() if naive else ():
                worst[name] = max(
                    worst.get(name, (0.0, "")), (value / naive, f"{row['distribution']} D {row['head_dim']}")
                )
        shown = ", ".join(f"{name} {ratio:.2f} ({where})" for name, (ratio, where) in worst.items())
        lines.append(f"{dtype}: {shown or 'naive has none'}")
    return lines


def bad_errors(report: Report) -> list[str]:
    """Where in the error table a kernel, of those that serve a call, gave no finite result, a line each."""
    return [
        f"{error_column(result)}, {row['dtype']}, {row['distribution']}, D {row['head_dim']}: {result['refused']}"
        for row in report.get("accuracy", {}).get("rows", [])
        for result in row["results"]
        if "kernel" in result and "refused" in result
    ]


def summary(report: Report) -> str:
    """The last lines on the terminal: counts, each kernel against its limit, against the best peer, overheads."""
    problems = report["problems"]
    wrong = [problem["name"] for problem in problems if bad(problem)]
    lines = ["summary:", f"  {len(problems)} problem{'s' * (len(problems) != 1)}, {len(wrong)} wrong or failed"]
    if not report["verified"]:
        lines.append("  results were not checked (--no-verify)")
    lines += [f"  WRONG OR FAILED: {name}" for name in wrong]
    failed = {name: report[f"{name}_failed"] for name in ("overheads", "accuracy") if f"{name}_failed" in report}
    lines += [f"  FAILED: {name}: {reason}" for name, reason in failed.items()]
    lines += [f"  NOT FINITE OR FAILED: {line}" for line in bad_errors(report)]
    if "accuracy" in report:
        lines += [f"  SKIPPED: {line}" for line in report["accuracy"]["skipped"]]
        lines += [f"  error over that of naive, at most, {line}" for line in error_ratios(report["accuracy"])]
    lines += [f"  not measured for lack of time: {name}" for name in report.get("left_out", [])]
    ours = [(p, r) for p in problems for r in p["results"] if "peer" not in r and "tflops" in r]
    for kernel in dict.fromkeys(result["kernel"] for _, result in ours):
        mine = [(problem, result) for problem, result in ours if result["kernel"] == kernel]
        # Problems that show drift have few queries; their speed says little.
        mine = [(problem, result) for problem, result in mine if not problem.get("value_mean")] or mine
        text = f"  {kernel}: {len(mine)} measured, {_spread([r['fraction_of_limit'] for _, r in mine])} of its limit"
        ratios = [r["tflops"] / best for p, r in mine if (best := _best_peer(p)) is not None]
        if ratios:
            text += f", {_spread(ratios)} times the best peer's speed"
        lines.append(text)
    found = report.get("overheads", {})
    calls = found.get("calls_us", {})
    for new in next(iter(calls.values()), {}):
        lines.append(
            f"  us per call, {new}: " + ", ".join(f"{name} {times[new][1]:.0f}" for name, times in calls.items())
        )
    for name, unit in (("import_s", "s of import"), ("memory_mib", "MiB")):
        if name in found:
            lines.append(f"  {unit}: " + ", ".join(f"{key} {number(value)}" for key, value in found[name].items()))
    return "\n".join(lines)


def _best_peer(problem: dict[str, Any]) -> float | None:
    return max((r["tflops"] for r in problem["results"] if "peer" in r and "tflops" in r), default=None)


def _spread(fractions: list[float]) -> str:
    return f"{min(fractions):.2f} to {max(fractions):.2f} (median {statistics.median(fractions):.2f})"
