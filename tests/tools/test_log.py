"""The logger `cuflash`: plans of new problems, every call with its shapes, and nothing unless it is asked for."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import log
from cuflash.cpu import execute
from cuflash.plan.table import CPU_KERNEL

X = np.ones((2, 5, 8), np.float32)
PACKED, BOUNDARIES = np.ones((5, 2, 8), np.float32), np.array([0, 2, 5])
TOKENS, GATES = np.ones((1, 5, 2, 8), np.float32), np.zeros((1, 5, 2))
CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: cuflash.attention(X, X[:, :3], X[:, :3]),
    "attention_lse": lambda: cuflash.attention_lse(X, X[:, :3]),
    "attention_varlen": lambda: cuflash.attention_varlen(PACKED, PACKED, PACKED, BOUNDARIES),
    "attention_with_kv_cache": lambda: cuflash.attention_with_kv_cache(X[None], X[None], X[None], seqlens_k=3),
    "chunk_gated_delta_rule": lambda: cuflash.chunk_gated_delta_rule(TOKENS, TOKENS, TOKENS, GATES, GATES),
    "merge_attention_states": lambda: cuflash.merge_attention_states([X, X], [X[..., 0], X[..., 0]]),
}
every_function = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(execute, "_calls", {})
    log._log_once.cache_clear()
    yield


@every_function
def test_every_call_is_logged_with_its_shapes(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "cuflash"):
        for _ in range(3):
            CALLS[name]()
    calls = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert len(calls) == 3 and all(call.startswith(f"call: {name} float32, ") for call in calls)
    assert all(f" -> {CPU_KERNEL}; " in call for call in calls)
    shapes = {"attention_varlen": "q (5, 2, 8)", "merge_attention_states": "lses (2, 5)"}
    usual = "5, 2, 8)" if "gated" in name else "2, 5, 8)"
    assert all(shapes.get(name, usual) in call for call in calls)
    assert {record.name for record in caplog.records} == {"cuflash"}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "merge_attention_states"])
def test_a_plan_is_logged_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    CALLS[name]()
    with caplog.at_level(logging.INFO, "cuflash"):
        log._log_once.cache_clear()
        execute._calls.clear()
        for _ in range(3):
            CALLS[name]()
    (plan,) = [record.getMessage() for record in caplog.records]
    assert plan.startswith(f"new: {name} float32, ") and plan.endswith(f" -> {CPU_KERNEL}")


@every_function
def test_silent_by_default(name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        CALLS[name]()
    assert caplog.records == [] and capsys.readouterr() == ("", "")


def test_nothing_is_formatted_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("log_call", "array_shapes", "shapes_given"):
        monkeypatch.setattr(execute, name, None)
    for _ in range(2):
        cuflash.attention(X, X, X)


@every_function
def test_options_print_whatever_the_level(
    name: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with cuflash.options(log=True):
        CALLS[name]()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"cuflash: {name} float32, ")
    assert lines[0].endswith(f" -> {CPU_KERNEL}")
    assert caplog.records == []


def test_programs_without_logging_see_nothing() -> None:
    assert any(isinstance(handler, logging.NullHandler) for handler in log.logger.handlers)
    assert log.logger.level == logging.NOTSET and log.logger.propagate


class Full(io.StringIO):
    """A stream of a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [None, Full()])
def test_without_a_stderr_that_takes_it(
    stream: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with cuflash.options(log=True):
        assert CALLS["attention"]().shape == X.shape
    assert capsys.readouterr().out == ""
