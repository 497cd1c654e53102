"""Pictures of the digits, of what attention made of them, and of what it finds new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .digits import Digits, Reading, hardest, most_attended

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_examples(digits: Digits, count: int = 20) -> Figure:
    """The first images with their labels, ten to a row."""
    from matplotlib.figure import Figure

    rows = -(-count // 10)
    figure = Figure(figsize=(8, 1.0 * rows), layout="constrained")
    for axes, image, label in zip(figure.subplots(rows, 10).flat, digits.images, digits.labels, strict=False):
        _draw_digit(axes, image, str(label), "black")
    return figure


def draw_hardest(
    queries: Digits, reading: Reading, training: Digits, temperature: float, count: int = 8, neighbours: int = 6
) -> Figure:
    """One row for each of the hardest images: the image, and the training images that it attended to most."""
    from matplotlib.figure import Figure

    rows = hardest(reading, queries.labels, count)
    some = Reading(reading.probabilities[rows], reading.lse[rows])
    attended, weights = most_attended(queries[rows], some, training, temperature, neighbours)
    figure = Figure(figsize=(1.15 * (neighbours + 1.6), 1.45 * count), layout="constrained")
    figure.suptitle("Hardest digits, and what they attended to most")
    median = np.median(reading.lse)
    caption = (
        "Left: a held-out image, what it is and what attention read (red: wrong). Beside it: the training images with",
        "the largest weights, as digit: weight (red: another digit). The lse says how well the training images cover",
        f"an image; its median over all {len(queries)} held-out images is {median:.1f}, lower is less familiar.",
    )
    figure.supxlabel("\n".join(caption), fontsize=9, x=0.01, ha="left")
    widths = [1.25] + [1.0] * neighbours
    for axes_row, row, keys, key_weights in zip(
        figure.subplots(count, neighbours + 1, width_ratios=widths, squeeze=False),
        rows,
        attended,
        weights,
        strict=True,
    ):
        truth, said = queries.labels[row], reading.labels[row]
        title = f"is {truth}, read {said}\nlse {reading.lse[row]:.1f}"
        _draw_digit(axes_row[0], queries.images[row], title, "tab:green" if truth == said else "tab:red")
        for axes, key, weight in zip(axes_row[1:], keys, key_weights, strict=True):
            label = training.labels[key]
            _draw_digit(axes, training.images[key], f"{label}: {weight:.0%}", "black" if label == truth else "tab:red")
    return figure


def _draw_digit(axes: Any, image: np.ndarray, title: str, color: str) -> None:
    axes.imshow(image.reshape(8, 8), cmap="gray_r", vmin=0, vmax=16)
    axes.set_title(title, fontsize=9, color=color)
    axes.set_axis_off()


def draw_novelty(known: np.ndarray, unseen: np.ndarray, scrambled: np.ndarray) -> Figure:
    """Histograms of the lse of three kinds of queries."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    bins = np.linspace(min(map(np.min, (known, unseen, scrambled))), known.max(), 60).tolist()
    groups = (
        ("held-out digit", known, "tab:green"),
        ("digit left out of the training images", unseen, "tab:orange"),
        ("pixels in random order", scrambled, "tab:red"),
    )
    for label, lse, color in groups:
        axes.hist(lse, bins=bins, density=True, alpha=0.6, label=label, color=color)
    axes.set_xlabel("lse (log density of the training images at the query, up to a constant)")
    axes.set_yticks([])
    axes.legend()
    return figure
