"""Draw docs/masks.svg: which keys a query sees, as `cuflash.attention` itself says.

`python docs/draw_masks.py` writes the picture anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import cuflash

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = Path(__file__).with_name("masks.svg")
COLUMNS = 4
SIDE = 8  # of a panel, in squares

# Lengths of queries and keys, and the options: one panel for each.
PANELS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (8, 8, {"causal": True}),
    (4, 8, {"causal": True}),
    (4, 8, {"causal": "top_left"}),
    (8, 4, {"causal": True}),
    (4, 8, {"causal": True, "query_offset": 2}),
    (8, 8, {"window": (2, 1)}),
    (8, 8, {"causal": True, "window": (2, None)}),
    (4, 8, {"window": (2, 0), "query_offset": 1}),
)


def visible_keys(seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which keys (columns) each query (rows) gives a weight, found by calling `cuflash.attention`."""
    q, k = np.zeros((seqlen_q, 1)), np.zeros((seqlen_k, 1))
    # With the unit vectors for values the output is the weights.
    return np.asarray(cuflash.attention(q, k, np.eye(seqlen_k), **options) > 0)


def title(seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> str:
    """Return the options as one writes them, and the lengths."""
    return f"Nq {seqlen_q}, Nk {seqlen_k}\n" + ", ".join(f"{name}={value!r}" for name, value in options.items())


def draw() -> Figure:
    """Draw one panel for each entry of PANELS."""
    from matplotlib.figure import Figure

    rows = -(-len(PANELS) // COLUMNS)
    figure = Figure(figsize=(2.6 * COLUMNS, 2.9 * rows))
    # Fixed margins: where a square lies follows from PANELS alone, whatever the fonts are.
    figure.subplots_adjust(left=0.04, right=0.99, bottom=0.02, top=0.84, wspace=0.22, hspace=0.45)
    for n, (axes, panel) in enumerate(zip(figure.subplots(rows, COLUMNS).flat, PANELS, strict=True)):
        _draw_panel(axes, f"visible_{n}", *panel)
    return figure


def _draw_panel(axes: Axes, name: str, seqlen_q: int, seqlen_k: int, options: dict[str, Any]) -> None:
    query, key = np.nonzero(visible_keys(seqlen_q, seqlen_k, options))
    axes.hlines(np.arange(seqlen_q + 1), 0, seqlen_k, colors="0.8", linewidth=0.5)
    axes.vlines(np.arange(seqlen_k + 1), 0, seqlen_q, colors="0.8", linewidth=0.5)
    axes.plot(key + 0.5, query + 0.5, linestyle="none", marker="s", markersize=15, color="tab:blue", gid=name)
    axes.set_title(title(seqlen_q, seqlen_k, options), fontsize=9)
    axes.set_xlabel("key j", fontsize=8)
    axes.set_ylabel("query i", fontsize=8)
    axes.xaxis.set_label_position("top")
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(seqlen_k) + 0.5, np.arange(seqlen_k).astype(str))
    axes.set_yticks(np.arange(seqlen_q) + 0.5, np.arange(seqlen_q).astype(str))
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlim(0, SIDE)
    axes.set_ylim(SIDE, 0)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)


def save(path: Path) -> None:
    """Draw the picture into an SVG file that is the same in every run."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "cuflash", "svg.fonttype": "none", "font.family": "DejaVu Sans"}):
        draw().savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    save(PICTURE)
