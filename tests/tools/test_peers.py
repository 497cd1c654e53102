"""cuDNN as a peer of the benchmark: that its graph is asked for what the problem is, by a stand-in that computes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.bench import command as bench
from cuflash.bench.cases import GROUPS, Case
from cuflash.bench.check import check
from cuflash.bench.exact import exact_result
from cuflash.bench.inputs import Inputs, make_inputs
from cuflash.problem.arrays import DTYPES

PEERS = str(Path(cuflash.__file__).resolve().parents[1] / "benchmarks" / "peers.py")
CASE = Case("", "float16", 2, 4, 2, 40, 40, 16, 8)
STREAM = 77


class FakeArray(np.ndarray):
    """A NumPy array that says where it is as CuPy's do."""

    device = SimpleNamespace(id=0)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


def on_gpu(inputs: Inputs) -> Inputs:
    """The same, as if the arrays were CuPy's."""
    return inputs._replace(arrays={name: x.view(FakeArray) for name, x in inputs.arrays.items()})


class Tensor:
    """A tensor of cuDNN's graph, with the setters that the peer uses."""

    def __init__(self, dim: Any = None, stride: Any = None, data_type: Any = None, name: str = "") -> None:
        self.dim, self.stride, self.data_type, self.is_output = dim, stride, data_type, False

    def set_output(self, value: bool) -> Tensor:
        self.is_output = value
        return self

    def set_data_type(self, value: str) -> Tensor:
        self.data_type = value
        return self

    def set_dim(self, value: list[int]) -> Tensor:
        self.dim = value
        return self

    def set_stride(self, value: list[int]) -> Tensor:
        self.stride = value
        return self

    def at(self, address: int) -> np.ndarray:
        """The array that begins at an address."""
        dtype = DTYPES[self.data_type]
        size = 1 + sum((length - 1) * step for length, step in zip(self.dim, self.stride, strict=True))
        memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address))
        strides = [step * dtype.itemsize for step in self.stride]
        return np.ndarray(self.dim, dtype, memory, strides=strides)


class Graph:
    """What `cudnn.pygraph` does with attention, in float64, from its documentation."""

    def __init__(self, **options: Any) -> None:
        assert options["handle"].stream == STREAM and options["compute_data_type"] == "float32"
        self.is_built = False

    tensor = staticmethod(Tensor)

    def sdpa(self, name: str, generate_stats: bool, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        assert not generate_stats and all(step > 0 for x in (q, k, v, options.get("bias", q)) for step in x.stride)
        self.operands, self.options, self.out = [q, k, v], options, Tensor()
        return [self.out, None]

    def build(self, modes: list[str]) -> None:
        right = self.options.get("diagonal_band_right_bound")
        if self.options["use_alibi_mask"] and right != 0:
            raise ValueError("When alibi mask is used, diagonal_band_right_bound needs to be set to 0.")
        self.is_built = self.out.is_output

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pointers: dict[Tensor, int], workspace: int, handle: Any) -> None:
        assert self.is_built and workspace and handle.stream == STREAM
        q, k, v = (x.at(pointers[x]).astype(np.float64) for x in self.operands)
        k, v = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        logits = self.options["attn_scale"] * (q @ k.swapaxes(-1, -2))
        if "bias" in self.options:
            logits += self.options["bias"].at(pointers[self.options["bias"]])
        row, column = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
        if self.options["use_alibi_mask"]:
            slopes = 2.0 ** (-8 / q.shape[1] * np.arange(1, q.shape[1] + 1))
            logits += slopes[:, None, None] * (column - row)
        if self.options.get("diagonal_alignment") == "bottom right":
            row = row + k.shape[2] - q.shape[2]
        left, right = (self.options.get(f"diagonal_band_{side}_bound") for side in ("left", "right"))
        if left is not None:
            logits = np.where(column <= row - left, -np.inf, logits)
        if right is not None:
            logits = np.where(column > row + right, -np.inf, logits)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        self.out.at(pointers[self.out])[...] = weights / weights.sum(-1, keepdims=True) @ v


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Callable[[Inputs], Callable[[], Any]]:
    """The peer, between stand-ins for cuDNN's module and CuPy."""
    module = SimpleNamespace(
        data_type=SimpleNamespace(HALF="float16", BFLOAT16="bfloat16", FLOAT="float32"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"),
        create_handle=SimpleNamespace,
        set_stream=lambda handle, stream: setattr(handle, "stream", stream),
        pygraph=Graph,
        __version__="1.32.0",
        backend_version_string=lambda: "9.20.0",
        __spec__=SimpleNamespace(),
    )
    cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=STREAM))
    empty = lambda shape, dtype: np.empty(shape, dtype).view(FakeArray)  # noqa: E731
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, empty=empty))
    monkeypatch.setitem(sys.modules, "torch", None)
    found = bench.load_peers(PEERS, "gpu")
    assert found.versions is not None and found.versions()["cuDNN"] == "9.20.0"
    return found.attention["cuDNN"]


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        CASE._replace(dtype="bfloat16", causal=True),
        CASE._replace(causal=True, seqlen_k=70),
        CASE._replace(causal=True, seqlen_q=1, seqlen_k=70),
        CASE._replace(window=(9, 3)),
        CASE._replace(window=(9, None), causal=True, seqlen_k=70),
        CASE._replace(window=(9, 3), seqlen_q=1, seqlen_k=70),
        CASE._replace(bias=True),
        CASE._replace(causal=True, alibi=True),
    ],
    ids=lambda case: case.name,
)
def test_cudnn_is_asked_for_the_problem(case: Case, cudnn: Callable[[Inputs], Callable[[], Any]]) -> None:
    inputs = make_inputs(case, np)
    verdict = check(exact_result(inputs), {"out": np.asarray(cudnn(on_gpu(inputs))())}, np)
    assert verdict.good, str(verdict)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (CASE._replace(dtype="float32"), "float16 and bfloat16 only"),
        (CASE._replace(softcap=3.0), "no softcap"),
        (CASE._replace(alibi=True), "needs to be set to 0"),
    ],
)
def test_cudnn_refuses_with_a_reason(case: Case, reason: str, cudnn: Callable[[Inputs], Callable[[], Any]]) -> None:
    inputs = on_gpu(make_inputs(case, np))
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        cudnn(inputs)


def test_slopes_of_the_table_are_those_of_cudnn() -> None:
    """Which takes no others."""
    cases = [case for group in GROUPS.values() for case in group if isinstance(case, Case) and case.alibi]
    assert cases and all(case.heads & (case.heads - 1) == 0 for case in cases)


def test_cudnn_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "cudnn", None)
    assert "cuDNN" not in bench.load_peers(PEERS, "gpu").attention
