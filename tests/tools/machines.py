"""Stand-ins for machines: with a driver or without, with a CuPy that fits it or not, and GPUs that are toasters."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuflash import doctor
from cuflash.gpu import core, installed

ARCHS = {12: [50, 60, 61, 70, 75, 80, 86, 89, 90, 100, 103, 120, 121], 13: [75, 80, 86, 89, 90, 100, 103, 120, 121]}
"""What NVRTC 12.9 and 13.0 compile for, by major version."""


class Machine(NamedTuple):
    """What a program finds; by default all is well, with one GPU."""

    driver: int | None = 13000
    """The newest CUDA that it runs, as the driver says; None for no driver."""
    built_for: int = 13000
    """CUDA of the CuPy that is installed."""
    packages: tuple[str, ...] = ("cupy-cuda13x",)
    import_error: Exception | None = None
    """Raised by `import cupy`."""
    device_error: str = ""
    """What CUDA says when it is asked for devices."""
    count: int = 1
    capability: tuple[int, int] = (9, 0)
    nvrtc: tuple[int, int] | None = (13, 0)
    archs: list[int] | None = None
    """What that compiles for."""

    def set_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it this one."""
        monkeypatch.setattr(installed, "load_driver", self._driver)
        monkeypatch.setattr(installed, "_cupy_packages", lambda: list(self.packages))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if self.import_error is not None:
            for module in (installed, doctor, core):
                monkeypatch.setattr(module, "import_cupy", self._fail)
            return
        cupy = self._cupy()
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
        monkeypatch.setattr("cuflash.gpu.execute._found_gpu_type", None)  # it is kept, and would be that of the toaster
        for name in ("attention", "attention_with_kv_cache", "chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
            monkeypatch.setattr(doctor, name, _as_on_a_gpu(getattr(doctor, name)))

    def _driver(self) -> Any:
        if self.driver is None:
            return None

        def version(pointer: Any) -> None:
            pointer._obj.value = self.driver

        return SimpleNamespace(cuDriverGetVersion=version)

    def _fail(self) -> None:
        assert self.import_error is not None
        raise self.import_error

    def _device_count(self) -> int:
        if self.device_error:
            raise RuntimeError(self.device_error)
        return self.count

    def _nvrtc_version(self) -> tuple[int, int]:
        if self.nvrtc is None:
            raise RuntimeError("Failure finding libnvrtc.so:\nNo such file")
        return self.nvrtc

    def _cupy(self) -> Any:
        """A CuPy whose arrays are NumPy's."""
        major, minor = self.capability
        properties = {"name": b"Toaster", "major": major, "minor": minor}
        properties |= {"multiProcessorCount": 2, "totalGlobalMem": 3 << 30}
        cupy: Any = ModuleType("cupy")
        cupy.__version__ = "1.2"
        cupy.ndarray = type("unused", (), {})
        gpu_array = type("ndarray", (np.ndarray,), {"get": lambda self: np.asarray(self)})
        cupy.asarray = lambda x: x.view(gpu_array)
        cuda = cupy.cuda = ModuleType("cupy.cuda")
        cuda.is_available = lambda: not self.device_error and self.count > 0
        cuda.Device = lambda number: nullcontext(SimpleNamespace(compute_capability=f"{major}{minor}"))
        cuda.runtime = SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceCount=self._device_count,
            getDeviceProperties=lambda number: properties,
            runtimeGetVersion=lambda: self.built_for,
        )
        archs = self.archs or ARCHS[self.built_for // 1000]
        cuda.nvrtc = SimpleNamespace(getVersion=self._nvrtc_version, getSupportedArchs=lambda: archs)
        return cupy


def _as_on_a_gpu(function: Any) -> Any:
    def call(q: Any, *others: Any, **options: Any) -> Any:
        found = function(q, *others, **options)
        return tuple(x.view(type(q)) for x in found) if isinstance(found, tuple) else found.view(type(q))

    return call
