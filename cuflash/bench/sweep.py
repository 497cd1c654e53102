"""The sweep: is any problem slower than the formula as one writes it down, or than PyTorch's form of it?

A ratio is the time of a peer over ours, so that what is below 1 is slower than that peer. Everything here reads the
plain data that `--json` stores.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from .report import CHOSEN, Report, column, trouble

SWEEP = "sweep"
"""Name of the group of cases."""
WORST = 10
NO_MEMORY = "does not fit memory"


class Ratio(NamedTuple):
    """How one problem compares with one peer."""

    problem: dict[str, Any]
    peer: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f} {self.problem['name']}, {self.peer}"


def problems(report: Report) -> list[dict[str, Any]]:
    """Those of the sweep."""
    return [problem for problem in report["problems"] if problem["group"] == SWEEP]


def ratios(report: Report) -> list[Ratio]:
    """Every problem of the sweep beside every peer that was measured, the worst first."""
    found = []
    for problem in problems(report):
        seconds = {column(result): result["seconds"] for result in problem["results"] if "seconds" in result}
        ours = seconds.pop(CHOSEN, None)
        if ours is not None:
            found += [Ratio(problem, peer, theirs / ours) for peer, theirs in seconds.items()]
    return sorted(found, key=lambda ratio: ratio.ratio)


def not_measured(report: Report) -> list[str]:
    """Problems for which a peer, or our own kernel, has no speed, and why; a line for each reason of each peer.

    What does not fit memory is named, problem by problem; of the rest there is a count for each dtype.
    """
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for problem in problems(report):
        for result in problem["results"]:
            reason = trouble(result)
            if reason is not None:
                kind = NO_MEMORY if "memory" in reason.lower() else reason.removeprefix("not measured: ")
                reasons.setdefault((column(result), kind, problem["dtype"]), []).append(problem["name"])
    lines = []
    for (who, reason, dtype), names in reasons.items():
        shown = ", ".join(names) if reason == NO_MEMORY else f"{len(names)} of {dtype}"
        lines.append(f"{who}, {reason}: {shown}")
    return lines


def means(found: Sequence[Ratio], key: Callable[[Ratio], Hashable]) -> dict[Any, float]:
    """Geometric means of ratios by what a key says of each, in the order of their first."""
    groups: dict[Any, list[float]] = {}
    for ratio in found:
        groups.setdefault(key(ratio), []).append(ratio.ratio)
    return {name: geometric_mean(of_group) for name, of_group in groups.items()}


def _spread(found: list[Ratio], name: str) -> str:
    by_value = means(sorted(found, key=lambda ratio: ratio.problem[name]), lambda ratio: ratio.problem[name])
    return ", ".join(f"{value} {mean:.2f}" for value, mean in by_value.items())


def verdict(report: Report) -> str:
    """How many ratios are below 1, in a sentence."""
    found = ratios(report)
    slower = sum(ratio.ratio < 1 for ratio in found)
    return (
        f"{len({ratio.problem['name'] for ratio in found})} problems, {len(found)} comparisons: "
        f"{slower or 'none'} slower than the peer; geometric mean {geometric_mean(r.ratio for r in found):.2f}"
    )


def summary(report: Report) -> str:
    """Lines for the terminal; none if nothing of the sweep was compared."""
    found = ratios(report)
    lines = [f"  not measured: {line}" for line in not_measured(report)]
    if not found:
        return "\n".join(lines)
    peers = means(found, lambda ratio: ratio.peer)
    return "\n".join(
        [
            f"  sweep, times a peer's speed: {verdict(report)}",
            "  by peer: " + ", ".join(f"{name} {mean:.2f}" for name, mean in peers.items()),
            f"  by dtype: {_spread(found, 'dtype')}",
            f"  by head_dim: {_spread(found, 'head_dim')}",
            *(f"  worst: {ratio}" for ratio in found[:WORST]),
            *lines,
        ]
    )


def table(report: Report) -> str:
    """Markdown: the least ratio of each head_dim and length, over dtypes, masks, batches and peers."""
    found = ratios(report)
    lengths = sorted({ratio.problem["seqlen_q"] for ratio in found})
    least: dict[tuple[int, int], Ratio] = {}
    for ratio in found:
        least.setdefault((ratio.problem["head_dim"], ratio.problem["seqlen_q"]), ratio)
    lines = [f"| head_dim | {' | '.join(f'N {n}' for n in lengths)} |", "|---:|" + "---:|" * len(lengths)]
    for head_dim in sorted({at[0] for at in least}):
        cells = [least.get((head_dim, n)) for n in lengths]
        shown = ("-" if cell is None else f"{cell.ratio:.2f} {cell.problem['dtype']}" for cell in cells)
        lines.append(f"| {head_dim} | {' | '.join(shown)} |")
    return "\n".join(lines)
