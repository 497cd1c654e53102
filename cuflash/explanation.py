"""What `explain` finds out about a call, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass

from .gpu.compile import entry_text
from .plan.build import Prediction
from .plan.gated import GatedPlan
from .plan.plan import Plan
from .plan.table import Device
from .problem.gated import GatedProblem
from .problem.problem import Problem

NUM_SHOWN = 4
"""Tiles of which a report says what they are expected to take."""


@dataclass(frozen=True, repr=False)
class Explanation:
    """Which kernel serves a call, and why; it prints as a short report.

    Attributes
    ----------
    problem : Problem or GatedProblem
        The call, without its data.
    kernel : str
        Name of the kernel; ``"cpu"`` for the NumPy back end.
    tile : str
        Rows x keys of a tile, or tokens x features of v; empty for the NumPy back end.
    device : Device or None
        The GPU; None for the NumPy back end.
    plan : Plan, GatedPlan or None
        Everything that the launch needs; None for the NumPy back end.
    num_blocks : int
        Of the launch; 0 for the NumPy back end.
    num_threads : int
        Threads of a block, or of the NumPy back end.
    shared_memory : int
        Bytes per block.
    workspace : int
        Bytes of scratch memory; what the `workspace` argument must hold at least.
    registers : int or None
        Per thread; None where there is no compiler to ask.
    spill_bytes : int or None
        Register bytes per thread that did not fit; None where there is no compiler to ask.
    refusals : tuple of (str, str)
        Kernels ahead of this one in the table and why each refused.
    predictions : tuple of Prediction
        What the time model says of each tile that may serve the call, the least `time` (microseconds) first; of none
        where it is not asked.
    source : str
        The generated source of the kernel; empty for the NumPy back end.
    """

    problem: Problem | GatedProblem
    kernel: str
    tile: str
    device: Device | None
    plan: Plan | GatedPlan | None
    num_blocks: int
    num_threads: int
    shared_memory: int
    workspace: int
    registers: int | None
    spill_bytes: int | None
    refusals: tuple[tuple[str, str], ...]
    predictions: tuple[Prediction, ...] = ()

    @property
    def source(self) -> str:
        return entry_text(self.plan.program) if self.plan else ""

    def __str__(self) -> str:
        lines = _lines_of_cpu(self) if self.device is None else _lines_of_gpu(self, self.device)
        refused = [f"  not {name}: {reason}" for name, reason in self.refusals]
        return "\n".join([str(self.problem), *lines, *refused])

    __repr__ = __str__


def _lines_of_cpu(found: Explanation) -> list[str]:
    return [f"  kernel         {found.kernel}: NumPy arrays are computed on the CPU, {found.num_threads} threads"]


def _lines_of_gpu(found: Explanation, device: Device) -> list[str]:
    plan, beside = found.plan, ""
    tile = "tokens x features of v" if isinstance(plan, GatedPlan) else "rows x keys"
    if isinstance(plan, Plan) and plan.num_splits > 1:
        beside = f": {plan.num_splits} splits of the keys for each tile, merged by a second kernel"
    if isinstance(plan, Plan) and plan.preparation:
        beside += f"; keys and values are made ready by {plan.preparation.program.kernel}, once"
    if isinstance(plan, GatedPlan) and plan.launches[:-1]:
        first, *carrying, last = plan.launches
        beside += f"; chunks are made ready by {first.program.kernel}, once"
        if carrying:
            names = " and ".join(launch.program.kernel for launch in carrying)
            beside += f"; of {last.num_segments} segments, in front of which {names} compute states"
    if isinstance(plan, Plan) and plan.append is not None:
        beside += f"; new keys are appended first, by {plan.append.program.kernel}"
    registers = f"unknown (no NVRTC here that compiles for {device.arch})"
    if found.num_blocks == 0:
        registers = "none: nothing is launched"
    if found.registers is not None:
        registers = f"{found.registers} per thread, {found.spill_bytes} bytes spilled"
    return [
        f"  kernel         {found.kernel} for {device.arch}",
        f"  tile           {found.tile} ({tile}), {found.num_threads} threads",
        f"  grid           {found.num_blocks} blocks{beside}",
        f"  shared memory  {found.shared_memory} of {device.shared_memory_per_block} bytes per block",
        f"  registers      {registers}",
        f"  workspace      {found.workspace} bytes",
        *_lines_of_predictions(found.predictions),
    ]


def _lines_of_predictions(predictions: tuple[Prediction, ...]) -> list[str]:
    """Why it is this tile, and how near the next ones are."""
    if not predictions:
        return []
    shown = []
    for time, kernel, tile, num_splits in predictions[:NUM_SHOWN]:
        name = tile if kernel == predictions[0].kernel else f"{kernel} {tile}"
        splits = f" of {num_splits} splits" if num_splits > 1 else ""
        shown.append(f"{name}{splits} {time:{'.0f' if time >= 100 else '.1f'}} us")
    return [f"  time model     {', '.join(shown)}"]
