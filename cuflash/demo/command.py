"""`python -m cuflash demo`: does the job, prints its claims measured, and saves the picture of the hardest digits."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from ..bench.outputs import check_picture, save_picture
from ..dense import attention
from ..explain import explain
from ..gpu.installed import choose_backend
from ..settings import settings
from . import digits
from .digits import Digits, Reading
from .pictures import draw_hardest


def report(xp: ModuleType, training: Digits, held_out: Digits) -> tuple[bool, Reading, float]:
    """Print the whole job; return whether it did what it must, the held-out reading and the temperature."""
    temperature = digits.choose_temperature(xp, training)
    reading = digits.read(xp, held_out, training, temperature)
    ours, others = digits.accuracy(reading.labels, held_out.labels), digits.baselines(training, held_out)
    print(f"{len(held_out)} held-out digits attend to {len(training)} training digits ({xp.__name__}, float32)")
    print(f"temperature           1/{1 / temperature:.0f}, chosen on {digits.NUM_VALIDATION} of the training images")
    print(f"accuracy              {ours:.1%}, log loss {digits.log_loss(reading.probabilities, held_out.labels):.3f}")
    for name, other in others.items():
        print(f"  {name:<19} {other:.1%} (scikit-learn, raw pixels)")

    unseen = digits.unseen_class_auroc(xp, held_out, training, temperature)
    noise = digits.novelty_auroc(reading.lse, digits.read(xp, digits.scrambled(held_out), training, temperature).lse)
    print("lse tells known from new (area under the ROC curve; guessing gives 0.5)")
    print(f"  a left-out digit    {unseen.mean():.3f} mean of ten, {unseen.min():.3f} worst (digit {unseen.argmin()})")
    print(f"  scrambled pixels    {noise:.3f}")

    within = True
    print(f"error against float64 (allowed: {digits.MARGIN:g} x naive attention in float32)")
    for name, (error, allowed) in digits.errors(reading, held_out, training, temperature).items():
        within = within and error <= allowed
        print(f"  {name:<19} {error:.1e}, allowed {allowed:.1e}{'' if error <= allowed else '   TOO LARGE'}")

    print("one call              time, peak memory beside the inputs")
    for name, (seconds, size) in digits.costs(xp, held_out, training, temperature).items():
        print(f"  {name:<19} {1e3 * seconds:.3f} ms, {size / 2**20:.2f} MiB")
    q, k, v = digits.operands(xp, held_out, training)
    print(explain(attention, q, k, v, scale=1 / temperature, return_lse=True))
    return ours > others["most frequent digit"] and within, reading, temperature


def main(args: list[str]) -> int:
    """Run the demo; 0 if attention beats the most frequent digit and its error is within bounds."""
    parser = argparse.ArgumentParser(prog="python -m cuflash demo", description="Read handwritten digits by attention.")
    parser.add_argument("--backend", choices=("auto", "numpy", "gpu"), default="auto", help="default: auto")
    parser.add_argument("--output", default="digits.png", metavar="FILE", help="the picture; default: digits.png")
    chosen = parser.parse_args(args)
    try:
        import matplotlib  # noqa: F401
        import sklearn  # noqa: F401
    except ImportError as error:
        print(f"The demo needs {error.name}: pip install matplotlib scikit-learn")
        return 2
    try:
        check_picture(Path(chosen.output))
    except (OSError, ValueError) as error:
        print(f"--output {chosen.output}: {error}")
        return 2
    try:
        xp = choose_backend(chosen.backend)
    except RuntimeError as error:
        print(f"--backend {chosen.backend}: {error}")
        return 2
    training, held_out = digits.load()
    try:
        good, reading, temperature = report(xp, training, held_out)
    except ValueError as error:
        chosen_kernel, chosen_tile, _ = settings()
        if not (chosen_kernel or chosen_tile):
            raise
        print(f"CUFLASH_KERNEL or CUFLASH_TILE: {error}")
        return 2
    save_picture(draw_hardest(held_out, reading, training, temperature), Path(chosen.output), dpi=100)
    print(f"hardest digits        {chosen.output}")
    if not good:
        print("FAILED: attention must beat the most frequent digit, with every error within what is allowed")
    return 0 if good else 1
