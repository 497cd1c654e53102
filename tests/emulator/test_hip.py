"""Sources compile for an AMD GPU (RDNA3, waves of 32 lanes), with clang alone: groundwork for CuPy's ROCm builds.

Nothing is linked or run. `hip/builtins.h` stands in for what HIP's compiler declares; `hip/ptx` defines instructions.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import pytest
from kernels.test_sources import representative_plans

from cuflash.gpu.compile import entry_text
from cuflash.plan.table import KERNELS, KernelSpec
from emulator.emulator import shadow_sources

HERE = Path(__file__).resolve().parent / "hip"
PORTED = ("forward_scalar", "forward_wmma", "forward_points")
"""Rows whose instructions all have a definition for AMD."""
NVIDIA_ALONE = ("forward_mma", "precise_float32", "precise_float64")
"""Rows whose layout of registers is that of mma.sync; RDNA3's products hold their operands otherwise."""
TARGET = "gfx1100"
SHAPES = ("64", "128", "everything", "varlen", "odd_bytes")
"""Problems that are compiled; RDNA3 has no tf32."""


@lru_cache(maxsize=1)
def _clang() -> str | None:
    """A clang that knows RDNA3 (16 or newer: the builtins changed their types before)."""
    for name in ("clang++-19", "clang++-18", "clang++-17", "clang++-16", "clang++"):
        path = shutil.which(name)
        if path:
            code = subprocess.run([path, "--print-targets"], capture_output=True, text=True, check=False).stdout
            version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=False).stdout
            if "amdgcn" in code and int(version.partition(".")[0] or 0) >= 16:
                return path
    return None


def test_every_row_is_ported_or_not() -> None:
    assert {spec.name for spec in KERNELS} == {*PORTED, *NVIDIA_ALONE}


@pytest.mark.skipif(_clang() is None, reason="no clang 16 or newer with AMD GPUs (Debian: clang-16 or clang-19)")
@pytest.mark.parametrize("spec", [spec for spec in KERNELS if spec.name in PORTED], ids=lambda spec: spec.name)
def test_compiles_for_amd(spec: KernelSpec, tmp_path: Path) -> None:
    sources = shadow_sources(tmp_path / "src", definitions=HERE)
    plans = representative_plans(spec, 86)
    assert plans
    for name, plan in plans.items():
        if name.partition("-")[0] == "tf32" or name.partition("-")[2] not in SHAPES:
            continue
        entry = tmp_path / "entry.hip"
        entry.write_text(entry_text(plan.program))
        command = [
            _clang() or "", "-x", "hip", f"--offload-arch={TARGET}", "--cuda-device-only", "-nogpuinc", "-nogpulib",
            "-std=c++17", "-O2", "-S", "-include", str(HERE / "builtins.h"), f"-I{sources}", str(entry), "-o", "-",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{name}:\n{result.stderr}"
        assert f"cuflash_{spec.name}:" in result.stdout
