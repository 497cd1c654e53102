"""Handwritten digits, read by attention alone: `python -m cuflash demo`, and what the notebook shows of it."""

from __future__ import annotations

from ..bench.inputs import to_host
from ..gpu.installed import choose_backend
from .digits import (
    accuracy,
    baselines,
    choose_temperature,
    costs,
    errors,
    load,
    log_loss,
    lse_without_each_class,
    novelty_auroc,
    operands,
    read,
    scrambled,
    unseen_class_auroc,
    validation_losses,
)
from .pictures import draw_examples, draw_hardest, draw_novelty

__all__ = [
    "accuracy", "baselines", "choose_backend", "choose_temperature", "costs", "draw_examples", "draw_hardest",
    "draw_novelty", "errors", "load", "log_loss", "lse_without_each_class", "novelty_auroc", "operands", "read",
    "scrambled", "to_host", "unseen_class_auroc", "validation_losses",
]  # fmt: skip
