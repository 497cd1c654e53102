"""Pictures of what `python -m cuflash bench` measured: speeds, errors, the sweep; those of README.md and of docs/."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .outputs import save_picture
from .report import Report, column, columns, error_column
from .sweep import ratios

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save(report: Report, path: Path) -> None:
    """Draw a report into a file; the ending of its name says which format."""
    save_picture(draw(report), path, dpi=130)


def draw(report: Report) -> Figure:
    """One panel of speeds for each dtype, mask and head_dim, and below them one of errors."""
    from matplotlib.figure import Figure

    problems = [p for p in report["problems"] if any("tflops" in result for result in p["results"])]
    attention = [p for p in problems if "seqlen_q" in p]
    plain = [p for p in attention if _is_plain(p)] or attention
    names = columns(problems)
    rows = list(dict.fromkeys((p["dtype"], p["causal"]) for p in plain))
    head_dims = sorted({p["head_dim"] for p in plain})
    height = 2.4 * max(len(rows), 1)
    figure = Figure(figsize=(max(8.0, 2.7 * len(head_dims)), height + 4.0), layout="constrained")
    figure.suptitle(f"cuflash on {report['device']}")
    panels: Any = figure.subfigures(2, 1, height_ratios=[height, 3.2])
    grid = panels[0].subplots(max(len(rows), 1), max(len(head_dims), 1), squeeze=False)
    for axes_row, key in zip(grid, rows, strict=False):
        of_row = [p for p in plain if (p["dtype"], p["causal"]) == key]
        top = max(result["tflops"] for p in of_row for result in p["results"] if "tflops" in result)
        for axes, head_dim in zip(axes_row, head_dims, strict=True):
            shown = [p for p in of_row if p["head_dim"] == head_dim]
            _draw_speeds(axes, shown, names, f"{key[0]}, D {head_dim}, {'causal' if key[1] else 'full'}")
            axes.set_ylim(0, 1.1 * top)
    panels[0].supxlabel("sequence length (tokens)", fontsize=10)
    panels[0].supylabel("speed (TFLOP/s)", fontsize=10)
    _draw_errors(panels[1].subplots(), problems, names)
    return figure


def describe(report: Report) -> str:
    """What a stored plot says of its origin, so that an old one can be told."""
    return f"{report['device']}, {report['date']}, sources {report['versions']['sources']}"


OVERVIEW = (("bfloat16", "seqlen_q", "head_dim", 128), ("float32", "head_dim", "seqlen_q", 4096),
            ("float64", "head_dim", "seqlen_q", 4096))  # fmt: skip
"""Panels of the overview: dtype, what runs along the axis, and what is fixed at which value."""
AXIS_LABELS = {"seqlen_q": "tokens", "head_dim": "head_dim"}


def save_overview(report: Report, path: Path) -> None:
    """Draw the README's plot: causal self-attention in three dtypes; the same file from the same report."""
    from matplotlib.figure import Figure

    causal = [p for p in report["problems"] if p["group"] == p["dtype"] and _is_plain(p) and p["causal"]]
    names = columns(causal)
    figure = Figure(figsize=(9.5, 3.0), layout="constrained")
    for axes, (dtype, along, fixed, value) in zip(figure.subplots(1, len(OVERVIEW)), OVERVIEW, strict=True):
        shown = [p for p in causal if p["dtype"] == dtype and p[fixed] == value]
        _draw_speeds(axes, shown, names, f"{dtype}, {AXIS_LABELS[fixed]} = {value}, causal", along)
        axes.set_xlabel(AXIS_LABELS[along])
        axes.set_ylim(0)
    figure.axes[0].set_ylabel("speed (TFLOP/s)")
    figure.suptitle(f"cuflash on {report['device']}", fontsize=10)
    _save_svg(figure, report, path)


def save_errors(report: Report, path: Path) -> None:
    """Draw the error table, a panel for each dtype: the rms error, largest over head dimensions, by distribution."""
    from matplotlib.figure import Figure

    rows = report["accuracy"]["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    distributions = list(dict.fromkeys(row["distribution"] for row in rows))
    results = [result for row in rows for result in row["results"] if "rms" in result]
    names = list(dict.fromkeys(map(error_column, results)))
    figure = Figure(figsize=(9.5, 6.0), layout="constrained")
    for axes, dtype in zip(figure.subplots(2, 2, sharex=True).flat, dtypes, strict=False):
        for place, name in enumerate(names):
            largest: dict[int, float] = {}
            for row in (row for row in rows if row["dtype"] == dtype):
                at = distributions.index(row["distribution"])
                found = [result.get("rms", 0.0) for result in row["results"] if error_column(result) == name]
                largest[at] = max([largest.get(at, 0.0), *found])
            points = {at + 0.5 * ((place + 0.5) / len(names) - 0.5): rms for at, rms in largest.items() if rms}
            style = _style(names, name) | {"linestyle": "none"}
            axes.plot(list(points), list(points.values()), label=name, **style)
        axes.set_title(dtype, fontsize=9)
        axes.set_yscale("log")
        axes.set_xticks(range(len(distributions)), distributions, rotation=60, ha="right", fontsize=8)
        axes.grid(alpha=0.3)
    figure.supylabel("rms error, relative", fontsize=10)
    figure.suptitle(f"errors on {report['device']}", fontsize=10)
    _save_svg(figure, report, path)


def save_sweep(report: Report, path: Path) -> None:
    """Draw the sweep, a panel for each dtype: the least ratio of a problem to its peers against head_dim."""
    from matplotlib.figure import Figure

    least: dict[str, Any] = {}
    for ratio in ratios(report):
        least.setdefault(ratio.problem["name"], ratio)
    lengths, head_dims = (sorted({r.problem[name] for r in least.values()}) for name in ("seqlen_q", "head_dim"))
    dtypes = list(dict.fromkeys(p["dtype"] for p in report["problems"] if p["group"] == "sweep"))
    figure = Figure(figsize=(9.5, 3.0), layout="constrained")
    panels: Any = figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        for length in lengths:
            of_length = [r for r in least.values() if (r.problem["dtype"], r.problem["seqlen_q"]) == (dtype, length)]
            points = dict(sorted((r.problem["head_dim"], r.ratio) for r in of_length))
            style = _style([f"N {n}" for n in lengths], f"N {length}")
            axes.plot(list(points), list(points.values()), "-", label=f"N {length}", **style)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_title(dtype, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(head_dims, map(str, head_dims), fontsize=8)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("head_dim")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("times the faster peer's speed")
    figure.suptitle(f"cuflash on {report['device']}", fontsize=10)
    _save_svg(figure, report, path)


def _save_svg(figure: Figure, report: Report, path: Path) -> None:
    """Put a legend below the panels, and write the same file for the same report."""
    import matplotlib

    lines = {str(line.get_label()): line for axes in figure.axes for line in axes.lines}
    lines = {label: line for label, line in lines.items() if not label.startswith("_")}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=min(len(lines), 8), fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "cuflash", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Description": describe(report)})


def _is_plain(problem: dict[str, Any]) -> bool:
    """Whether a problem differs from others of its panel in its length and its number of heads only."""
    return (
        problem["seqlen_q"] == problem["seqlen_k"]
        and problem["head_dim"] == problem["head_dim_v"]
        and problem["heads"] == problem["kv_heads"]
        and problem["window"] is problem["softcap"] is None
        and not problem["bias"]
        and problem["group"] != "options"
    )


def _style(names: list[str], name: str) -> dict[str, Any]:
    """Kernels are drawn through, peers are dashed; the same colour and marker for a name everywhere."""
    place = names.index(name)
    return {"color": f"C{place % 10}", "marker": "osD^vP*X<>"[place % 10], "markersize": 5}


def _draw_speeds(
    axes: Axes, problems: list[dict[str, Any]], names: list[str], title: str, along: str = "seqlen_q"
) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log", base=2)
    for name in names:
        points = {}
        is_peer = False
        for problem in problems:
            for result in problem["results"]:
                if column(result) == name and "tflops" in result:
                    points[problem[along]] = result["tflops"]
                    is_peer = "peer" in result
        if points:
            lengths = sorted(points)
            line = "--" if is_peer else "-"
            axes.plot(lengths, [points[n] for n in lengths], line, label=name, **_style(names, name))
    lengths = sorted({p[along] for p in problems})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if not problems:
        axes.set_visible(False)


def _draw_errors(axes: Axes, problems: list[dict[str, Any]], names: list[str]) -> None:
    """Relative error of every result, a column for each dtype, and what the gate allows."""
    dtypes = list(dict.fromkeys(p["dtype"] for p in problems))
    for name in names:
        points = [
            (dtypes.index(p["dtype"]) + 0.7 * ((names.index(name) + 0.5) / len(names) - 0.5), r["relative_error"])
            for p in problems
            for r in p["results"]
            if column(r) == name and r.get("relative_error")
        ]
        style = _style(names, name) | {"linestyle": "none", "alpha": 0.7}
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, **style)
    allowed = {
        p["dtype"]: r["allowed"] for p in problems for r in p["results"] if "allowed" in r and not p.get("value_mean")
    }
    for place, (dtype, limit) in enumerate(allowed.items()):
        at = dtypes.index(dtype)
        axes.hlines(limit, at - 0.4, at + 0.4, color="black", linewidth=1, label="" if place else "allowed")
    axes.set_xticks(range(len(dtypes)), dtypes)
    axes.set_xlabel("dtype")
    axes.set_xlim(-0.5, max(len(dtypes), 1) - 0.5)
    if any(r.get("relative_error") for p in problems for r in p["results"]):
        axes.set_yscale("log")
    axes.set_ylabel("relative error\nagainst float64")
    axes.grid(alpha=0.3, axis="y")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
