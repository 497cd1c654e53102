"""What type checkers see of cuflash, as a program that has it installed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import typing
import venv
from pathlib import Path

import numpy as np
import pytest

import cuflash

ROOT = Path(cuflash.__file__).parent.parent

HEAD = '''
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import cuflash
from cuflash import (
    KVCache, attention, attention_lse, attention_varlen, chunk_gated_delta_rule, chunk_gated_output, explain,
    merge_attention_states, options, recurrent_gated_delta_rule, warmup,
)

Array = NDArray[np.float32]


class Tensor:
    """A GPU array of another library."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        raise NotImplementedError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

'''

GOOD = """
def block(x: Array, w: Array) -> Array:
    x = x + attention(x, x, x, causal=True)
    y = attention(x, x, x)
    y = y * 2
    y = y @ w
    y *= 2
    y = np.maximum(y, 0)
    for head in range(8):
        y[head] = y[head].T
    z = 2 * attention(x, x, x)
    y = z.astype(np.float32) - (1 - attention(x, x, x))
    y = w @ attention(x, x, x)
    y[(attention(x, x, x) > 0).all(axis=-1)] = 1
    return x - attention(x, x, x) + y


def both(q: NDArray[np.float16], mask: NDArray[np.bool_]) -> tuple[NDArray[np.float16], Array]:
    return attention(q, q, q, mask=mask, return_lse=True)


def into(q: NDArray[np.float64], out: NDArray[np.float64], lse: NDArray[np.float64]) -> float:
    out, lse = attention(q, q, q, out=out, lse=lse)
    written = attention(q, q, q, out=out)
    return float(written.sum() + lse.max())


def maybe(q: Array, with_lse: bool) -> Array:
    result = attention(q, q, q, return_lse=with_lse)
    return result[0] if isinstance(result, tuple) else result


def every_option(q: Array, i: np.int64, window: tuple[int, int | None]) -> Array:
    slopes, bias, offsets = np.ones(q.shape[-3], np.float32), np.zeros((1, 1, 5, 5)), np.zeros(2, np.int32)
    a = attention(
        q, q, q, causal="top_left", window=window, scale=0.5, bias=bias, softcap=30, alibi_slopes=slopes, sinks=slopes,
        precision="tf32", out_dtype="float16", workspace=None,
    )
    b = attention(q, q, q, query_offset=3, window=(i, None), scale=np.float32(2), out_dtype=np.float64)
    c = attention(q, q, q, query_offset=i, window=[1, 0], out_dtype=np.dtype("float32"))
    d = attention(q, q, q, query_offset=offsets, out_dtype=ml_dtypes.bfloat16, causal=np.bool_(True), window=[3, None])
    assert a.dtype == b.dtype or c.shape == d.astype(np.float32).shape
    return attention(q, q, q, causal="bottom_right", precision="ieee")


def packed(q: Array, boundaries: NDArray[np.int32]) -> Array:
    out = attention_varlen(q, q, q, boundaries, boundaries, causal=True, max_seqlen_q=int(boundaries[1]))
    out = out + 1
    out, lse = attention_varlen(q, q, q, boundaries, return_lse=True)
    lse += 1
    return out


def alone(q: Array, h: NDArray[np.float16]) -> float:
    lse = attention_lse(q, q, causal=True, scale=0.5, bias=np.zeros((1, 1)), query_offset=0, workspace=None)
    into: Array = attention_lse(h, h, out=np.empty(h.shape[:-1], np.float32))
    return float(lse.sum() + into.max())


def wide(q: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    lse: NDArray[np.float64] = attention_lse(q, q)
    tokens, gates = q[:, :, :, None], q
    assert lse.shape == gates.shape
    return chunk_gated_delta_rule(tokens, tokens, tokens, gates, gates, output_final_state=True)


def merged(q: Array) -> Array:
    parts = [attention(q, q[:, s], q[:, s], return_lse=True) for s in (slice(0, 3), slice(3, 9))]
    out, lse = merge_attention_states(*zip(*parts))
    out, lse = merge_attention_states(np.stack([out, out]), np.stack([lse, lse]))
    joined, _ = merge_attention_states([out for out, _ in parts], [lse for _, lse in parts])
    return joined


def gated(x: Array, g: Array, boundaries: NDArray[np.int64], final: bool) -> Array:
    o: Array = chunk_gated_delta_rule(x, x, x, g, -g, scale=0.5, chunk_size=32)
    o, state = chunk_gated_delta_rule(x, x, x, g, -g, output_final_state=True, out=o)
    o = recurrent_gated_delta_rule(x, x, x, g, -g, state, scale=np.float32(2))
    o += chunk_gated_output(x[0], x[0], x[0], state, g[0], boundaries, chunk_size=np.int64(16))
    either = chunk_gated_delta_rule(x[:1], x[:1], x[:1], g[:1], g[:1], cu_seqlens=boundaries, output_final_state=final)
    return either[0] if isinstance(either, tuple) else o + 1


def gated_on_a_gpu(x: Tensor) -> Any:
    o, state = chunk_gated_delta_rule(x, x, x, x, x, initial_state=x, output_final_state=True)
    o = recurrent_gated_delta_rule(x, x, x, x, x, state, out=o)
    return chunk_gated_output(x, x, x, state, x, x).get() + chunk_gated_delta_rule(x, x, x, x, x).get()


def gated_from_cupy(x: Any) -> Any:
    o = chunk_gated_delta_rule(x, x, x, x, x)
    o = 0.5 * o - o / 2
    o, state = chunk_gated_delta_rule(x, x, x, x, x, output_final_state=True)
    return o.get() + state.get() + chunk_gated_delta_rule(x, x, x, x, x)[0].get()


def cached(x: Array, steps: int, with_lse: bool) -> Array:
    cache = KVCache(2, 1, x.shape[-1], capacity=np.int64(8), num_layers=2, page_size=4, dtype=np.float32)
    out = cache.attention(x, x, x)
    out, lse = cache.attention(x, x, v_new=x, layer=1, slots=slice(0, 2), causal=False, window=(3, 0), return_lse=True)
    cache.advance(x.shape[2])
    result = cache.attention(x[:1], slots=0, num_splits=steps, scale=0.5, return_lse=with_lse)
    written: Array = cache.attention(x, slots=[1, 0], causal="top_left", out=out, split_size=64)
    assert lse.shape == x.shape[:-1] and out.shape == written.shape
    return result[0] if isinstance(result, tuple) else result


def cached_on_a_gpu(x: Tensor, cache: KVCache) -> Any:
    out, lse = cache.attention(x, x, x, return_lse=True)
    return out + lse + cache.attention(x, sinks=x, out=x).get() + cache.attention(x, out_dtype="float16")


def untyped(rng: np.random.Generator) -> float:
    q, k, v = rng.standard_normal((3, 8, 100, 64), dtype=np.float32)
    out = attention(q, k, v, causal=True)
    out = out + 1
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    return float(np.abs(attention(q, k, v) - out).max())


def from_cupy(q: Any) -> Any:
    out = attention(q, q, q, causal=True)
    out = 0.5 * out - out / 2
    out += 1
    near = np.pi * out.get().ravel() < 3
    masks = (attention(q, q, q) == 1).get(), (2 > attention(q, q, q)).get(), (3 * attention(q, q, q)).get()
    return near.any(), masks, -attention(q, q, q)[0].get(), len(attention(q, q, q))


def on_a_gpu(q: Tensor) -> Any:
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    return attention(q, q, q, sinks=out).get() + lse + attention_lse(q, q, out=q).get()


def chosen(q: Array) -> str:
    with options(kernel="cpu", log=False):
        warmup(attention, q, q, q)
        explanation = explain(attention, q, q, q, causal=True)
    cuflash.show_config()
    reference, _ = cuflash.reference.attention(q, q, q)
    assert np.allclose(attention(q, q, q), reference)
    return explanation.kernel
"""

BAD = """
def wrong(x: Array, n: NDArray[np.int32], g: Tensor, untyped: Any, cache: KVCache) -> None:
    out, lse = attention(x, x, x)  # error
    out, lse = attention(x, x, x, return_lse=False)  # error
    out, lse = attention(x, x, x, out_dtype=np.float16)  # error
    out, lse = attention(g, g, g)  # error
    out, lse = attention(untyped, untyped, untyped)  # error
    out, lse = attention_varlen(x, x, x, n)  # error
    pair: tuple[Array, Array] = attention(x, x, x)  # error
    array: Array = attention(x, x, x, return_lse=True)  # error
    attention(x, x, x, return_lse=True).sum()  # error
    attention(x, x, x, lse=x).sum()  # error
    attention(g, g, g, return_lse=True).sum()  # error
    attention_varlen(x, x, x, n, return_lse=True).sum()  # error
    merge_attention_states(x, x).sum()  # error
    attention(x, x, x, causal="left")  # error
    attention(x, x, x, precision="fp32")  # error
    attention(x, x, x, out_dtype="int8")  # error
    attention(x, x, x, window=3)  # error
    attention(x, x, x, window=(1.5, None))  # error
    attention(x, x, x, query_offset=1.5)  # error
    attention(x, x, x, scale="1")  # error
    attention(x, x, x, mask=[True])  # error
    attention([[1.0]], x, x)  # error
    attention(x, x, x, True)  # error
    attention(x, x, x, is_causal=True)  # error
    attention(x, x, x, cu_seqlens_q=n)  # error
    attention_varlen(x, x, x, n, mask=x)  # error
    attention_varlen(x, x, x, n, max_seqlen_q=2.5)  # error
    attention_lse(x, x, x)  # error
    attention_lse(x, x, return_lse=True)  # error
    attention_lse(x, x, causal="left")  # error
    lse: Array = attention_lse(x, x, out=[1.0])  # error
    for head in attention(x, x, x):  # error
        pass
    out, lse = cache.attention(x)  # error
    out, lse = cache.attention(g, g, g, out_dtype="float16")  # error
    out, lse = cache.attention(untyped, untyped, untyped)  # error
    cache.attention(x, return_lse=True).sum()  # error
    cache.attention(x, x, x, 0)  # error
    cache.attention(x, layer=1.5)  # error
    cache.attention(x, slots="all")  # error
    cache.attention(x, seqlens_k=n)  # error
    cache.attention(x, page_table=n)  # error
    cache.attention(x, sofcap=3)  # error
    KVCache(1, 1, 8, 8, block_size=3)  # error
    options(kernal="cpu")  # error
    merge_attention_states(x, lse=x)  # error
    explain(attention, x, x, x, device=9.0)  # error
    o, state = chunk_gated_delta_rule(x, x, x, x, x)  # error
    o, state = chunk_gated_delta_rule(x, x, x, x, x, output_final_state=False)  # error
    o, state = chunk_gated_delta_rule(g, g, g, g, g)  # error
    o, state = chunk_gated_delta_rule(untyped, untyped, untyped, untyped, untyped)  # error
    chunk_gated_delta_rule(x, x, x, x)  # error
    chunk_gated_delta_rule(x, x, x, x, x, output_final_state=True).sum()  # error
    chunk_gated_delta_rule(g, g, g, g, g, output_final_state=True).sum()  # error
    chunk_gated_delta_rule(x, x, x, x, x, chunk_size=64.0)  # error
    chunk_gated_delta_rule(x, x, x, x, x, state=x)  # error
    chunk_gated_output(x, x, x, x, x)  # error
    recurrent_gated_delta_rule(x, x, x, x, x, [1.0])  # error
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs, and an environment that has cuflash and its requirements installed."""
    folder = tmp_path_factory.mktemp("program")
    venv.create(folder / "venv", with_pip=False)
    site = next((folder / "venv").glob("**/site-packages"))
    (site / "installed.pth").write_text(f"{ROOT}\n{Path(np.__file__).parent.parent}\n")
    (folder / "good.py").write_text("# pyright: strict\n" + HEAD + GOOD)
    (folder / "bad.py").write_text(HEAD + BAD)
    return folder


def check(folder: Path, command: list[str]) -> None:
    """Run a type checker: it must find what is marked, and nothing else."""
    done = subprocess.run([*command, "good.py", "bad.py"], cwd=folder, capture_output=True, text=True)
    found = re.findall(r"(\w+)\.py:(\d+):(?:\d+ - )? ?error", done.stdout)
    marked = {i for i, line in enumerate((HEAD + BAD).splitlines(), 1) if line.endswith("# error")}
    assert len(marked) > 20
    assert {int(line) for file, line in found if file == "bad"} == marked, done.stdout + done.stderr
    assert [line for file, line in found if file != "bad"] == [], done.stdout


def interpreter(folder: Path) -> str:
    return str(next((folder / "venv").glob("[bS][ic]*/python*")))


def test_mypy(program: Path) -> None:
    pytest.importorskip("mypy")
    check(program, [sys.executable, "-m", "mypy", "--strict", "--python-executable", interpreter(program)])


def test_pyright(program: Path) -> None:
    pyright = shutil.which("pyright")
    if pyright is None and importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed")
    command = [pyright] if pyright else [sys.executable, "-m", "pyright"]
    check(program, [*command, "--pythonpath", interpreter(program)])


def test_good_programs_run() -> None:
    """What the type checkers accept is accepted by the functions too."""
    names: dict[str, typing.Any] = {}
    exec(HEAD + GOOD, names)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 6, 6), dtype=np.float32)
    assert names["block"](x, x).shape == x.shape
    q = x.astype(np.float16)
    assert len(names["both"](q, np.ones((6, 6), bool))) == 2
    d = x.astype(np.float64)
    names["into"](d, np.empty_like(d), np.empty(d.shape[:-1]))
    for with_lse in (False, True):
        assert names["maybe"](x, with_lse).shape == x.shape
    y = np.stack([x[:, :5], x[:, :5]])
    assert names["every_option"](y, np.int64(2), (1, None)).shape == y.shape
    assert names["packed"](x, np.array([0, 3, 8], np.int32)).shape == x.shape
    assert names["merged"](x).shape == x.shape
    assert names["alone"](x, q) > 0
    tokens = rng.standard_normal((2, 5, 1, 4), dtype=np.float32) / 8
    assert names["gated"](tokens, -np.ones((2, 5, 1), np.float32), np.array([0, 3, 5]), True).shape == (1, 5, 1, 4)
    for with_lse in (False, True):
        assert names["cached"](tokens.swapaxes(1, 2)[:, :, :2], 1, with_lse).shape == (1, 1, 2, 4)
    assert names["untyped"](rng) >= 0
    assert names["chosen"](x) == "cpu"


@pytest.mark.parametrize(
    "function",
    [
        cuflash.KVCache.attention,
        cuflash.attention,
        cuflash.attention_lse,
        cuflash.attention_varlen,
        cuflash.attention_with_kv_cache,
        cuflash.chunk_gated_delta_rule,
        cuflash.chunk_gated_output,
        cuflash.merge_attention_states,
        cuflash.recurrent_gated_delta_rule,
    ],
    ids=lambda f: f.__name__,
)
def test_hints_can_be_read_at_run_time(function: typing.Any) -> None:
    assert {"return"} < set(typing.get_type_hints(function))
