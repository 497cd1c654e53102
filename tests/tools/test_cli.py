"""`python -m cuflash`: what it prints and its exit status."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import __main__ as cli
from cuflash.explain import FUNCTIONS
from cuflash.plan.gated import GATED_KERNELS
from cuflash.plan.table import KERNELS
from cuflash.problem.arrays import FLOAT_NAMES
from cuflash.problem.describe_gated import MAX_GATED_HEAD_DIM

OPERATIONS = ("attention", "KV cache", "gated delta rule")
"""What the doctor tries out."""


def run(*arguments: str, gpu: bool = False) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    command = [sys.executable, "-m", "cuflash", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cuflash {cuflash.__version__}\n", "")


def test_doctor() -> None:
    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"cuflash {cuflash.__version__}, sources ")
    for operation, dtype in product(OPERATIONS, FLOAT_NAMES):
        assert f"check: NumPy {operation} {dtype} relative error " in done.stdout
    assert done.stdout.count(" ok\n") == len(OPERATIONS) * len(FLOAT_NAMES) == done.stdout.count("check: ")
    assert "WRONG" not in done.stdout and "FAILED" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("verdict: ready for NumPy arrays only: ")


@pytest.mark.gpu
def test_doctor_with_a_gpu() -> None:
    done = run("doctor", gpu=True)
    assert done.returncode == 0
    for operation, dtype in product(OPERATIONS, FLOAT_NAMES):
        assert re.search(rf"check: GPU( 0)? {operation} {dtype} relative error .* ok\n", done.stdout)
    assert done.stdout.splitlines()[-1].startswith("verdict: ready, on GPU 0 (")


def test_kernels() -> None:
    done = run("kernels")
    assert (done.returncode, done.stderr) == (0, "")
    for spec in KERNELS:
        assert f"{spec.name}: {spec.summary}\n" in done.stdout
        assert ", ".join(spec.dtypes) in done.stdout and f"1 to {spec.max_head_dim}" in done.stdout
    for gated in GATED_KERNELS:
        assert f"{gated.name}: {gated.summary}\n  operations  {', '.join(gated.operations)}\n" in done.stdout
        of_v = "" if gated.max_head_dim == MAX_GATED_HEAD_DIM else f", of v 1 to {MAX_GATED_HEAD_DIM}"
        head_dim, row = (
            done.stdout.partition(f"{gated.name}: ")[2].partition(name)[2].splitlines()[0].strip()
            for name in ("head_dim  ", "GPUs  ")
        )
        assert head_dim == f"1 to {gated.max_head_dim}{of_v}"
        assert row.endswith(" and newer") == (not gated.capabilities), row
    assert "cpu: NumPy arrays, every feature\n" in done.stdout


def _first_row(capability: int) -> str:
    """Name of the row that serves a plain float16 call, of many keys."""
    x = np.empty((64, 4096, 64), np.float16)
    return cuflash.explain(cuflash.attention, x, x, x, device=capability).kernel


def test_explain() -> None:
    done = run("explain", "--q", "4,16,4096,128", "--causal", "--device", "90")
    assert (done.returncode, done.stderr) == (0, "")
    first, *rest = done.stdout.splitlines()
    assert first == "attention float16, batch 4, heads 16/16, 4096 x 4096, head_dim 128, window (None, 0)"
    assert rest[0] == f"  kernel         {_first_row(90)} for sm_90"


def test_explain_for_this_machine() -> None:
    done = run("explain", "--q", "4,16,4096,128")
    assert (done.returncode, done.stderr) == (0, "")
    assert "cpu: NumPy arrays are computed on the CPU" in done.stdout


@pytest.mark.gpu
def test_explain_for_the_gpu_of_this_machine() -> None:
    done = run("explain", "--q", "4,16,4096,128", gpu=True)
    assert done.returncode == 0
    assert " for sm_" in done.stdout and "registers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "first_line"),
    [
        (["--q", "5,8"], "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8"),
        (["--q", "8,5,8", "--k", "2,7,8"], "attention float16, batch 1, heads 8/2, 5 x 7, head_dim 8"),
        (["--q", "8,5,8", "--v", "8,5,6"], "attention float16, batch 1, heads 8/8, 5 x 5, head_dim 8/6"),
        (["--q", "5,8", "--dtype", "bfloat16"], "attention bfloat16, batch 1, heads 1/1, 5 x 5, head_dim 8"),
        (
            ["--q", "5,8", "--window", "3,4", "--softcap", "2.5", "--causal"],
            "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8, window (3, 0), softcap 2.5",
        ),
        (
            ["--q", "5,8", "--window", "3,none"],
            "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8, window (3, None)",
        ),
        (
            ["--q", "5,8", "--window", "none,0"],
            "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8, window (None, 0)",
        ),
        (["--q", "5,8", "--window", "none,none"], "attention float16, batch 1, heads 1/1, 5 x 5, head_dim 8"),
    ],
)
def test_explain_options(arguments: list[str], first_line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--device", "80", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first_line


def described(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, Any]:
    """Return the printed explanation of a command, and the problem that it explained."""
    found = []
    real = cli.explain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "explain", lambda *args, **options: found.append(real(*args, **options)) or found[-1])
        assert cli.main(["explain", "--device", "80", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out, found[0].problem


EVERY_OPTION = [
    ("causal", ["--causal"], {"causal": True}),
    ("causal", ["--causal", "top_left"], {"causal": "top_left"}),
    ("causal", ["--causal", "bottom_right"], {"causal": "bottom_right"}),
    ("window", ["--window", "3,none"], {"window": (3, None)}),
    ("query_offset", ["--query-offset", "-2"], {"query_offset": -2}),
    ("query_offset", ["--query-offset", "2:int64"], {"query_offset": np.zeros(2, np.int64)}),
    ("query_offset", ["--query-offset", ":int32"], {"query_offset": np.zeros((), np.int32)}),
    ("scale", ["--scale", "0.25"], {"scale": 0.25}),
    ("bias", ["--bias"], {"bias": np.zeros((5, 7), np.float16)}),
    ("bias", ["--bias", "2,1,5,1:float64"], {"bias": np.zeros((2, 1, 5, 1))}),
    ("mask", ["--mask"], {"mask": np.zeros((5, 7), bool)}),
    ("mask", ["--mask", "2,1,1,7"], {"mask": np.zeros((2, 1, 1, 7), bool)}),
    ("softcap", ["--softcap", "30"], {"softcap": 30}),
    ("alibi_slopes", ["--alibi-slopes"], {"alibi_slopes": np.zeros(4, np.float32)}),
    ("alibi_slopes", ["--alibi-slopes", "2,4:float16"], {"alibi_slopes": np.zeros((2, 4), np.float16)}),
    ("sinks", ["--sinks"], {"sinks": np.zeros(4, np.float32)}),
    ("sinks", ["--sinks", "1"], {"sinks": np.zeros(1, np.float32)}),
    ("precision", ["--precision", "ieee"], {"precision": "ieee"}),
    ("return_lse", ["--return-lse"], {"return_lse": True}),
    ("out", ["--out"], {"out": np.zeros((2, 4, 5, 6), np.float16)}),
    ("out", ["--out", "2,4,5,6:float32"], {"out": np.zeros((2, 4, 5, 6), np.float32)}),
    ("lse", ["--lse"], {"lse": np.zeros((2, 4, 5), np.float32)}),
    ("out_dtype", ["--out-dtype", "float32"], {"out_dtype": "float32"}),
    ("workspace", ["--workspace", "64"], {"workspace": np.zeros(64, np.uint8)}),
]


@pytest.mark.parametrize(
    ("arguments", "expected"), [case[1:] for case in EVERY_OPTION], ids=[" ".join(case[1]) for case in EVERY_OPTION]
)
def test_explain_takes_every_option(
    arguments: list[str], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    q, k, v = (np.zeros(shape, np.float16) for shape in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6)))
    _, problem = described(capsys, "--q", "2,4,5,8", "--k", "2,2,7,8", "--v", "2,2,7,6", *arguments)
    assert problem == cuflash.explain(cuflash.attention, q, k, v, device=80, **expected).problem


VARLEN_OPTIONS = [
    ("cu_seqlens_k", ["--cu-seqlens-k", "4:int64"], {"cu_seqlens_k": np.zeros(4, np.int64)}),
    ("max_seqlen_q", ["--max-seqlen-q", "5"], {"max_seqlen_q": 5}),
    ("max_seqlen_k", ["--max-seqlen-k", "5"], {"max_seqlen_k": 5}),
    ("alibi_slopes", ["--alibi-slopes", "--lse"], {"alibi_slopes": np.zeros(4, np.float32), "return_lse": True}),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), VARLEN_OPTIONS)
def test_explain_of_packed_sequences(
    name: str, arguments: list[str], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    x, boundaries = np.zeros((9, 4, 8), np.float16), np.zeros(4, np.int32)
    text, problem = described(capsys, "--q", "9,4,8", "--cu-seqlens-q", "4", *arguments)
    wanted = cuflash.explain(cuflash.attention_varlen, x, x, x, boundaries, device=80, **expected).problem
    assert problem == wanted and text.startswith("attention_varlen float16, batch 3, heads 4/4, 9 x 9")


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


HALF = np.dtype(np.float16)
TOKENS = ["--q", "2,5,2,8", "--v", "2,5,4,6"]
PACKED = ["--q", "1,9,2,8", "--v", "1,9,4,6"]
OUTPUT = ["--q", "150,2,8", "--v-new", "150,4,6"]
OF_TOKENS: dict[str, Any] = {"log_g": floats(2, 5, 4), "beta": floats(2, 5, 4)}
OF_PACKED: dict[str, Any] = {"log_g": floats(1, 9, 4), "beta": floats(1, 9, 4), "cu_seqlens": np.zeros(4, np.int32)}
OF_CHUNKS: dict[str, Any] = {
    "h": np.zeros((3, 4, 8, 6), HALF), "log_g_cumsum": floats(150, 4), "cu_seqlens": np.zeros(2, np.int32)
}  # fmt: skip
LSE, CHUNKS = "attention_lse", "chunk_gated_delta_rule"
RECURRENT, STATE = "recurrent_gated_delta_rule", floats(2, 4, 8, 6)
CACHED = "attention_with_kv_cache"
CACHES = ["--q", "2,4,5,8", "--k-cache", "2,2,16,8", "--v-cache", "2,2,16,6"]
OF_CACHES: dict[str, Any] = {"k_cache": (2, 2, 16, 8), "v_cache": (2, 2, 16, 6), "seqlens_k": np.zeros(2, np.int32)}
OTHER_FUNCTIONS: list[tuple[str, list[str], dict[str, Any]]] = [
    (LSE, ["--q", "2,4,5,8", "--k", "2,2,7,8"], {"k": (2, 2, 7, 8)}),
    (LSE, ["--q", "2,4,5,8", "--out", "--sinks"], {"out": floats(2, 4, 5), "sinks": floats(4)}),
    ("attention_varlen", ["--q", "9,4,8"], {"v": (9, 4, 8), "cu_seqlens_q": np.zeros(2, np.int32)}),
    (CACHED, CACHES, OF_CACHES),
    (CACHED, [*CACHES, "--seqlens-k", "7", "--num-splits", "3"], OF_CACHES | {"seqlens_k": 7, "num_splits": 3}),
    (CACHED, [*CACHES, "--seqlens-k", "7", "--split-size", "64"], OF_CACHES | {"seqlens_k": 7, "split_size": 64}),
    (CACHED, [*CACHES, "--k-new", "--v-new"], OF_CACHES | {"k_new": (2, 2, 5, 8), "v_new": (2, 2, 5, 6)}),
    (CACHED, [*CACHES, "--page-table", "2,9"], OF_CACHES | {"page_table": np.zeros((2, 9), np.int32)}),
    (CHUNKS, TOKENS, OF_TOKENS),
    (CHUNKS, [*TOKENS, "--beta", ":float16"], OF_TOKENS | {"beta": np.zeros((2, 5, 4), HALF)}),
    (CHUNKS, [*TOKENS, "--log-g", "2,5,4:float64"], OF_TOKENS | {"log_g": np.zeros((2, 5, 4))}),
    (CHUNKS, [*TOKENS, "--chunk-size", "32", "--scale", "2"], OF_TOKENS | {"chunk_size": 32, "scale": 2}),
    (CHUNKS, [*TOKENS, "--initial-state"], OF_TOKENS | {"initial_state": STATE}),
    (CHUNKS, [*TOKENS, "--output-final-state"], OF_TOKENS | {"output_final_state": True}),
    (CHUNKS, [*TOKENS, "--out"], OF_TOKENS | {"out": np.zeros((2, 5, 4, 6), HALF)}),
    (CHUNKS, [*PACKED, "--cu-seqlens", "4"], OF_PACKED),
    (CHUNKS, [*PACKED, "--cu-seqlens", "4", "--initial-state"], OF_PACKED | {"initial_state": floats(3, 4, 8, 6)}),
    (RECURRENT, TOKENS, OF_TOKENS | {"state": STATE}),
    (RECURRENT, [*TOKENS, "--state", "2,4,8,6"], OF_TOKENS | {"state": STATE}),
    ("chunk_gated_output", OUTPUT, OF_CHUNKS | {"h": np.zeros((3, 4, 8, 6), HALF)}),
    (
        "chunk_gated_output",
        [*OUTPUT, "--cu-seqlens", "3:int64", "--chunk-size", "16", "--log-g-cumsum", ":float16", "--h", "20,4,8,6"],
        {
            "h": np.zeros((20, 4, 8, 6), HALF), "log_g_cumsum": np.zeros((150, 4), HALF),
            "cu_seqlens": np.zeros(3, np.int64), "chunk_size": 16,
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "expected"), OTHER_FUNCTIONS, ids=[f"{name} {' '.join(a)}" for name, a, _ in OTHER_FUNCTIONS]
)
def test_explain_of_a_function_that_is_named(
    name: str, arguments: list[str], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {a.removeprefix("--").replace("-", "_"): b for a, b in zip(arguments[::2], arguments[1::2], strict=False)}
    arrays_of = ("q", "k_cache", "v_cache") if name == CACHED else ("q", "k", "v", "v_new")
    given = {x: tuple(map(int, shapes[x].split(","))) for x in arrays_of if x in shapes}
    if name != CACHED:
        given.setdefault("k", given["q"])
    arrays = {x: np.zeros(shape, HALF) for x, shape in given.items()}
    wanted = {x: np.zeros(value, HALF) if isinstance(value, tuple) else value for x, value in expected.items()}
    text, problem = described(capsys, name, *arguments)
    assert text.startswith(f"{name} float16, ")
    assert problem == cuflash.explain(getattr(cuflash, name), **{**arrays, **wanted}, device=80).problem


def test_gates_and_states_of_float64_are_as_wide(capsys: pytest.CaptureFixture[str]) -> None:
    _, problem = described(capsys, RECURRENT, *TOKENS, "--dtype", "float64")
    assert (problem.traits.gate_dtype, problem.traits.state_dtype) == ("float64", "float64")


def test_no_option_is_missing() -> None:
    parameters = {name for function in FUNCTIONS.values() for name in inspect.signature(function).parameters}
    tested = {name for name, *_ in EVERY_OPTION + VARLEN_OPTIONS} | {name for *_, x in OTHER_FUNCTIONS for name in x}
    assert tested | {"q", "k", "v_new"} == parameters


def test_explain_of_a_function_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--q", "1,8,128,64", "--device", "90", "--causal", "attention_lse"]) == 0
    assert capsys.readouterr().out.startswith("attention_lse float16, ")


def test_explain_insists_on_kernel_and_tile(capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = described(capsys, "--q", "4,500,64", "--kernel", "forward_scalar", "--tile", "32x32")
    assert "  kernel         forward_scalar for sm_80\n" in text and "  tile           32x32 (rows" in text


def test_explain_prints_the_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--q", "2,1000,64", "--device", "80", "--source"]) == 0
    printed = capsys.readouterr().out
    assert "#define CUFLASH_HEAD_DIM 64\n" in printed and f'#include "{_first_row(80)}.cu"\n' in printed


def test_explain_takes_the_capability_as_kernels_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for capability in ("80", "8.0"):
        assert cli.main(["explain", "--q", "2,100,64", "--device", capability]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "for sm_80\n" in printed[0]


def test_numpy_arrays_have_no_source() -> None:
    done = run("explain", "--q", "2,100,64", "--source")
    assert done.stdout.endswith("\nNumPy arrays need no kernel source; --device CC plans for a GPU\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--q", "2,5,8", "--k", "2,5,9"], "ValueError: k has head_dim 9 but q has 8\n"),
        (["--q", "2,5,600"], "ValueError: q has head_dim 600, expected 1 to 512\n"),
        (["--q", "5"], "ValueError: q has shape (5,), expected "),
        ([CACHED, "--q", "2,4,1,8"], f"ValueError: {CACHED} takes --k-cache B,H,N,D, the shape of the cache"),
        (["--q", "2,5,8", "--window", "3"], "ValueError: window has 1 entries"),
        (["--q", "2,5,8", "--window", "-1,-1"], "ValueError: window[0] (left) is -1, expected a non-negative int"),
        (["--window", "-1,none", "--q", "2,5,8"], "ValueError: window[0] (left) is -1, expected a non-negative int"),
        (["--q", "2,5,8", "--softcap", "0"], "ValueError: softcap is 0.0"),
        (["--q", "2,5,8", "--scale", "1e31"], "ValueError: scale is 1e+31, expected at most"),
        (["--q", "2,5,8", "--kernel", "foo"], "ValueError: kernel is 'foo', expected one of forward_wgmma"),
        (["--q", "2,5,8", "--tile", "banana"], "ValueError: tile is 'banana', expected rows x keys"),
        (["--q", "2,5,8", "--precision", "tf32"], "ValueError: precision='tf32' is for float32 arrays"),
        (["--q", "2,5,8", "--sinks", "3"], "ValueError: sinks has shape (3,), expected one that broadcasts to (2,)"),
        (["--q", "9,2,8", "--cu-seqlens-q", "4", "--mask"], "TypeError: attention_varlen() got an unexpected keyword"),
        (["--q", "5", "--bias", "--out", "--lse"], "ValueError: q has shape (5,), expected "),
        (
            ["--q", "2,5,8", "--causal", "top_left", "--query-offset", "2:int32"],
            "ValueError: causal='top_left' names a query offset, so query_offset must be None, got an array of shape",
        ),
        ([CHUNKS, "--q", "5"], "ValueError: q has shape (5,), expected (batch, tokens, heads, feature)"),
        ([CHUNKS, "--q", "1,5,2,8", "--v", "1,5,3,8"], "ValueError: v has 3 heads"),
        ([CHUNKS, "--q", "1,5,2,8", "--causal"], "TypeError: chunk_gated_delta_rule() got an unexpected keyword"),
        ([RECURRENT, "--q", "1,5,2,8", "--chunk-size", "64"], "TypeError: recurrent_gated_delta_rule() got an"),
        (["chunk_gated_output", "--q", "5,2,8", "--chunk-size", "0"], "ValueError: chunk_size is 0, expected 16, 32"),
        ([LSE, "--q", "2,5,8", "--v", "2,5,8"], "TypeError: attention_lse() got an unexpected keyword argument 'v'"),
        (["--q", "2,5,8", "--device", "9"], "ValueError: device is 9, expected a compute capability"),
    ],
)
def test_calls_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(message) and captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["cure"], "invalid choice: 'cure'"),
        (["doctor", "--loud"], "unrecognized arguments: --loud"),
        (["kernels", "fast"], "unrecognized arguments: fast"),
        (["explain"], "required: --q"),
        (["explain", "softmax", "--q", "5,8"], "argument FUNCTION: invalid choice: 'softmax'"),
        (["explain", "--q", "a,b"], "argument --q: invalid"),
        (["explain", "--q", "5,8", "--window", "3,open"], "argument --window: invalid"),
        (["explain", "--q", "5,8", "--query-offset", "1.5"], "argument --query-offset: invalid offset '1.5'"),
        (["explain", "--q", "-2,5,8"], "argument --q: invalid shape '-2,5,8', expected lengths such as"),
        (["explain", "--q", "2,-5,8"], "argument --q: invalid shape '2,-5,8', expected lengths such as"),
        (["explain", "--q", "5,8", "--query-offset", "a:int32"], "argument --query-offset: invalid shape 'a'"),
        (["explain", "--q", "5,8", "--bias", "5,8:half"], "argument --bias: invalid dtype 'half', expected one of"),
        (["explain", "--q", "5,8", "--causal", "left"], "argument --causal: invalid choice: 'left'"),
        (["explain", "--q", "2,5,8", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["explain", "--q", "2,5,8", "--device", "sm_90"], "argument --device: invalid compute capability 'sm_90'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("usage: python -m cuflash") and captured.out == ""


def test_bad_arguments_end_the_process() -> None:
    assert run("cure").returncode == 2
    refused = run("explain", "--q", "2,5,8", "--k", "2,5,9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "ValueError: k has head_dim 9 but q has 8\n"


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("doctor", "kernels", "explain", "bench", "demo"))


def test_bench_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.bench import command

    monkeypatch.setattr(command, "main", lambda arguments: 7 if arguments == ["--group", "drift"] else 0)
    assert cli.main(["bench", "--group", "drift"]) == 7


def test_demo_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuflash.demo import command as demo

    monkeypatch.setattr(demo, "main", lambda arguments: 7 if arguments == ["--backend", "numpy"] else 0)
    assert cli.main(["demo", "--backend", "numpy"]) == 7


def test_readers_of_a_pipe_may_stop_early() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    for unbuffered in ("1", ""):
        command = [sys.executable, "-m", "cuflash", "kernels"]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment)
        assert ended.returncode == 1 and not ended.stderr
    os.close(writer)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("command", ["kernels", "doctor"])
def test_a_full_disk_is_said_in_one_line(command: str, unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        run = [sys.executable, "-m", "cuflash", command]
        ended = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, env=environment, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "python -m cuflash: [Errno 28] No space left on device\n"
