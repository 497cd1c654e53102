"""Calls that are looked up: an option that decides a call is in the key by which an earlier one is found."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuflash

X, TOKENS = np.zeros((2, 4, 5, 8), np.float32), np.zeros((10, 4, 8), np.float32)
CALLS: dict[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]] = {
    cuflash.attention: ((X, X, X), {}),
    cuflash.attention_lse: ((X, X), {}),
    cuflash.attention_varlen: ((TOKENS, TOKENS, TOKENS, np.array([0, 4, 10])), {}),
    cuflash.attention_with_kv_cache: ((X, X.copy(), X.copy()), {"seqlens_k": np.array([2, 3])}),
}
NEW = np.zeros((2, 4, 1, 8), np.float32)
VALUES: dict[str, Any] = {
    "causal": True, "window": (1, 0), "query_offset": 1, "scale": 2.0, "softcap": 3.0, "precision": "tf32",
    "return_lse": True, "out_dtype": "float64", "bias": np.zeros((5, 5)), "mask": np.ones((5, 5), bool),
    "alibi_slopes": np.zeros(4), "sinks": np.zeros(4), "lse": np.zeros((2, 4, 5), np.float32), "out": np.zeros_like(X),
    "cu_seqlens_k": np.array([0, 5, 10], np.int32), "max_seqlen_q": 6, "max_seqlen_k": 6,
    "seqlens_k": np.zeros(2, np.int32), "k_new": NEW,
    "v_new": NEW, "page_table": np.zeros((2, 1), np.int32), "num_splits": 2, "split_size": 64,
}  # fmt: skip
NOT_IN_KEY = {"workspace"}
"""What a call that was found is asked about before it is used."""


def lookup(function: Callable[..., Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return what a call asks for: the arrays behind values, or which of them there are, and the options."""
    asked: list[tuple[Any, Any]] = []

    class Asked(Exception):
        pass

    def find(q: Any, k: Any, v: Any, others: Any, options: Any) -> Any:
        given = tuple(None if x is None else (x.shape, x.dtype) for x in others or ())
        asked.append((((q.shape, k.shape), *given), options))
        raise Asked

    monkeypatch.setattr(sys.modules[function.__module__], "find", find)
    arrays, always = CALLS[function]
    with pytest.raises(Asked):
        function(*arrays, **(always | options))
    return asked[0]


@pytest.mark.parametrize("function", CALLS, ids=[function.__name__ for function in CALLS])
def test_every_option_is_looked_up(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, _ = CALLS[function]
    names = list(inspect.signature(function).parameters)[len(arrays) :]
    plain = lookup(function, {}, monkeypatch)
    for name in set(names) - NOT_IN_KEY:
        assert name in VALUES, f"{name} has no value here"
        options = {name: VALUES[name]}
        assert lookup(function, options, monkeypatch) != plain, f"{name} is not looked up: calls with and without mix"
