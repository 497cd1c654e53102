"""Calls of the gated delta rule with NumPy arrays, computed by CUDA kernels on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cuflash.gpu.gated import addresses_of, gated_parts, gated_pointers
from cuflash.plan.gated import GatedLaunch, make_gated_plan
from cuflash.plan.table import Device, device_of
from cuflash.problem.arrays import ArrayInfo
from cuflash.problem.describe_gated import (
    describe_chunk_gated_delta_rule,
    describe_chunk_gated_output,
    describe_recurrent_gated_delta_rule,
)
from cuflash.problem.gated import GatedProblem
from cuflash.settings import Settings

from .emulator import compile_kernel, new_result, span


class GatedEmulator:
    """The functions of `cuflash.gated`, by one kernel."""

    def __init__(
        self, kernel: str, tile: str = "", device: Device | None = None, seed: int = 0, sources: Path | None = None
    ) -> None:
        self.settings = Settings(kernel, tile, False)
        self.device = device_of(90) if device is None else device
        self.seed = seed
        self.sources = sources

    def chunk_gated_output(self, *arrays: Any, **options: Any) -> Any:
        """Compute `cuflash.chunk_gated_output(...)`."""
        return self.run(*describe_chunk_gated_output(*arrays, **options), options.get("out"))

    def chunk_gated_delta_rule(self, *arrays: Any, **options: Any) -> Any:
        """Compute `cuflash.chunk_gated_delta_rule(...)`."""
        problem, infos = describe_chunk_gated_delta_rule(*arrays, **options)
        return self.run(problem, infos, options.get("out"), options.get("output_final_state", False))

    def recurrent_gated_delta_rule(self, *arrays: Any, **options: Any) -> Any:
        """Compute `cuflash.recurrent_gated_delta_rule(...)`."""
        return self.run(*describe_recurrent_gated_delta_rule(*arrays, **options), options.get("out"))

    def run(self, problem: GatedProblem, infos: dict[str, ArrayInfo], out: Any, final: bool = False) -> Any:
        """Compute a checked problem; `out` is the caller's own array, if given."""
        plan = make_gated_plan(problem, self.device, self.settings)
        traits, strides = problem.traits, problem.strides
        spans = {name: span(info) for name, info in infos.items()}
        batch = () if traits.op == "chunk_gated_output" else infos["q"].shape[:1]
        shape = (*batch, problem.seqlen, problem.num_heads_v, traits.head_dim_v)
        out, spans["out"] = new_result(shape, traits.dtype, strides.out, out)
        state = None
        if final:
            assert strides.final_state is not None
            shape = problem.num_sequences, problem.num_heads_v, traits.head_dim, traits.head_dim_v
            state, spans["final_state"] = new_result(shape, traits.state_dtype, strides.final_state, None)
        memory = np.full(plan.workspace + 16, 0xFF, np.uint8)  # poisoned, and of exactly the plan's size
        begin = memory.ctypes.data + -memory.ctypes.data % 16
        spans["prepared"] = begin, begin, begin + plan.workspace
        for launch in plan.launches:
            written = {"out", "final_state"} if launch is plan.launches[-1] else {"prepared"}
            self._launch(problem, launch, spans, begin, written)
        return (out, state) if final else out

    def _launch(
        self,
        problem: GatedProblem,
        launch: GatedLaunch,
        spans: dict[str, tuple[int, int, int]],
        workspace: int,
        written: set[str],
    ) -> None:
        pointers = gated_pointers(addresses_of(launch, {name: place[0] for name, place in spans.items()}, workspace))
        found = [(begin, end, name, name in written) for name, (_, begin, end) in spans.items() if begin < end]
        # A state that is updated in place has two names.
        twice = {place[:2] for place in found if place[3]}
        ranges = [place for place in found if place[3] or place[:2] not in twice]
        program = launch.program
        for blocks, values in gated_parts(problem, launch):
            kernel = compile_kernel(program, self.sources)
            kernel.launch(blocks, launch.num_threads, program.shared_memory, pointers + values, ranges, self.seed)
