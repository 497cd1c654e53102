"""Machines without a GPU or a compiler, for `explain`."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import cuflash

# The function of the same name hides the module from ordinary imports.
explain_module = sys.modules[cuflash.explain.__module__]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_module, "gpu_available", lambda: False)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> None:
        raise ImportError("no NVRTC")

    monkeypatch.setattr(explain_module, "compile_offline", missing)
    explain_module._compiled_resources.cache_clear()
