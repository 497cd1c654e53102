"""Machines without a GPU or a compiler, for `explain`."""

from __future__ import annotations

import sys

import pytest

import cuflash

# The function of the same name hides the module from ordinary imports.
explain_module = sys.modules[cuflash.explain.__module__]


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_module, "gpu_available", lambda: False)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_module, "compiles_for", lambda arch: False)
