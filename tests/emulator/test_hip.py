"""Sources compile for an AMD GPU (RDNA3, waves of 32 lanes), with clang alone: groundwork for CuPy's ROCm builds.

Nothing is linked or run. `hip/builtins.h` stands in for what HIP's compiler declares; `hip/ptx` defines instructions.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest
from kernels import test_gated_sources, test_sources

from cuflash.gpu.compile import entry_text
from cuflash.plan.gated import GATED_KERNELS, GatedSpec
from cuflash.plan.table import KERNELS, KernelSpec
from emulator.emulator import shadow_sources

HERE = Path(__file__).resolve().parent / "hip"
PORTED = ("forward_scalar", "forward_wmma", "forward_points", "gated_output", "gated_recurrent")
"""Rows whose instructions all have a definition for AMD."""
NVIDIA_ALONE = (
    "forward_wgmma", "forward_mma", "forward_decode", "precise_wgmma", "precise_float32", "precise_float64",
    "precise_wide", "precise_decode", "gated_output_mma", "gated_delta_mma", "gated_delta_wgmma",
)  # fmt: skip
"""Rows whose layout of registers is that of mma.sync or wgmma, which RDNA3 has not, or that load past caches."""
TARGET = "gfx1100"
SHAPES = ("64", "128", "everything", "varlen", "128/128", "swapped", "odd_bytes")
"""Problems that are compiled; RDNA3 has no tf32."""
ROWS = (*KERNELS, *GATED_KERNELS)
NEEDED = """
#if !__has_builtin(__builtin_amdgcn_exp2f)
#error
#endif
"""
"""The newest instruction that definitions for AMD take from clang."""


@lru_cache(maxsize=1)
def _clang() -> str | None:
    """A clang that knows RDNA3 and its instructions."""
    for name in ("clang++-19", "clang++-18", "clang++-17", "clang++"):
        path = shutil.which(name)
        if path:
            command = [
                path,
                "--target=amdgcn-amd-amdhsa",
                f"-mcpu={TARGET}",
                "-x",
                "c++",
                "-nogpulib",
                "-fsyntax-only",
                "-",
            ]
            if subprocess.run(command, input=NEEDED, capture_output=True, text=True, check=False).returncode == 0:
                return path
    return None


def test_every_row_is_ported_or_not() -> None:
    rows = {spec.name for spec in ROWS}
    assert rows == {*PORTED, *NVIDIA_ALONE}, "CONTRIBUTING.md, Add a kernel: name it in PORTED or NVIDIA_ALONE"


@pytest.mark.skipif(_clang() is None, reason="no clang that has exp2 of AMD GPUs (Debian: clang-19)")
@pytest.mark.parametrize("spec", [spec for spec in ROWS if spec.name in PORTED], ids=lambda spec: spec.name)
def test_compiles_for_amd(spec: KernelSpec | GatedSpec, tmp_path: Path) -> None:
    sources = shadow_sources(tmp_path / "src", definitions=HERE)
    module = test_gated_sources if isinstance(spec, GatedSpec) else test_sources
    plans = {
        name: plan
        for name, plan in module.representative_plans(spec, 86).items()
        if not name.startswith("tf32-") and name.partition("-")[2].split()[0] in SHAPES
    }
    assert plans
    for name, plan in plans.items():
        entry = tmp_path / "entry.hip"
        entry.write_text(entry_text(plan.program))
        command = [
            _clang() or "", "-x", "hip", f"--offload-arch={TARGET}", "--cuda-device-only", "-nogpuinc", "-nogpulib",
            "-std=c++17", "-O2", "-S", "-Dmemcpy=__builtin_memcpy", "-include", str(HERE / "builtins.h"),
            f"-I{sources}", str(entry), "-o", "-",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{name}:\n{result.stderr}"
        assert f"cuflash_{spec.name}:" in result.stdout
