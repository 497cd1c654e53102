"""Environment variables and `options()`."""

from __future__ import annotations

import asyncio
import contextvars
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash.gpu.compile import dump, entry_text
from cuflash.plan.gated import GATED_KERNELS
from cuflash.plan.names import kernel_names
from cuflash.plan.plan import make_plan
from cuflash.plan.table import KERNELS, device_of
from cuflash.problem.describe import describe_attention
from cuflash.settings import AUTOMATIC, KNOBS, Settings, num_threads, read, settings

X = np.ones((2, 5, 8), np.float32)
PACKAGE = Path(cuflash.__file__).parent


def test_automatic_by_default() -> None:
    assert settings() == AUTOMATIC
    assert Settings("", "", False) == AUTOMATIC


def test_options_nest_and_what_is_left_out_stays() -> None:
    with cuflash.options(kernel="forward_scalar"):
        assert settings() == Settings("forward_scalar", "", False)
        with cuflash.options(tile="64x64", log=True):
            assert settings() == Settings("forward_scalar", "64x64", True)
            with cuflash.options(kernel="", log=False):
                assert settings() == Settings("", "64x64", False)
            assert settings() == Settings("forward_scalar", "64x64", True)
        assert settings() == Settings("forward_scalar", "", False)
    assert settings() == AUTOMATIC


def test_options_end_with_an_error_too() -> None:
    with pytest.raises(KeyError), cuflash.options(kernel="cpu"):
        raise KeyError
    assert settings() == AUTOMATIC


def test_options_can_be_entered_again() -> None:
    chosen = cuflash.options(kernel="cpu")
    for _ in range(2):
        with chosen:
            with chosen:
                assert settings().kernel == "cpu"
            assert settings().kernel == "cpu"
        assert settings() == AUTOMATIC


def test_options_do_not_reach_other_threads() -> None:
    inside, outside = [], []
    entered, looked = threading.Event(), threading.Event()

    def other() -> None:
        entered.wait(10)
        inside.append(settings())
        with cuflash.options(kernel="cpu", log=True):
            inside.append(settings())
            looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with cuflash.options(tile="64x64"):
        entered.set()
        looked.wait(10)
        outside.append(settings())
    thread.join()
    assert inside == [AUTOMATIC, Settings("cpu", "", True)]
    assert outside == [Settings("", "64x64", False)]


def test_one_object_serves_several_threads() -> None:
    chosen = cuflash.options(kernel="cpu")
    barrier = threading.Barrier(4, timeout=10)

    def other(_: int) -> tuple[str, str]:
        barrier.wait()
        with chosen:
            barrier.wait()
            inside = settings().kernel
        barrier.wait()
        return inside, settings().kernel

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(other, range(4))) == [("cpu", "")] * 4


def test_options_do_not_reach_other_tasks() -> None:
    async def task(kernel: str, barrier: asyncio.Event) -> str:
        with cuflash.options(kernel=kernel):
            barrier.set()
            await asyncio.sleep(0.01)
            return settings().kernel

    async def both() -> list[str]:
        return await asyncio.gather(task("cpu", asyncio.Event()), task("forward_scalar", asyncio.Event()))

    assert asyncio.run(both()) == ["cpu", "forward_scalar"]


def test_options_may_end_in_any_order() -> None:
    outer, inner, same = (
        cuflash.options(kernel="cpu", tile="1x1"),
        cuflash.options(tile="2x2"),
        cuflash.options(log=True),
    )
    for one in (same, outer, inner, same):
        one.__enter__()
    assert settings() == Settings("cpu", "2x2", True)
    outer.__exit__(None, None, None)
    assert settings() == Settings("", "2x2", True)
    same.__exit__(None, None, None)
    assert settings() == Settings("", "2x2", True)
    inner.__exit__(None, None, None)
    assert settings() == Settings("", "", True)
    same.__exit__(None, None, None)
    assert settings() == AUTOMATIC


def test_options_end_where_they_were_entered() -> None:
    chosen, context = cuflash.options(kernel="cpu", log=False), contextvars.copy_context()
    chosen.__enter__()
    words = "options(kernel='cpu', log=False) ends in a context that it was not entered in"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        context.run(chosen.__exit__, None, None, None)
    assert context.run(settings) == AUTOMATIC
    assert settings().kernel == "cpu"
    inherited = contextvars.copy_context()
    chosen.__exit__(None, None, None)
    assert settings() == AUTOMATIC
    assert inherited.run(settings).kernel == "cpu"
    inherited.run(chosen.__exit__, None, None, None)
    assert inherited.run(settings) == AUTOMATIC


def test_options_in_a_suspended_generator() -> None:
    """They reach its caller, as is documented; how the two end does not matter then."""

    def suspended() -> Iterator[None]:
        with cuflash.options(tile="64x64"):
            yield

    generator = suspended()
    with cuflash.options(kernel="cpu"):
        next(generator)
        assert settings() == Settings("cpu", "64x64", False)
    assert settings() == Settings("", "64x64", False)
    with cuflash.options(kernel="cpu"):
        generator.close()
        assert settings() == Settings("cpu", "", False)
    assert settings() == AUTOMATIC


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"kernel": "fast"}, ValueError, f"kernel is 'fast', expected one of {', '.join(kernel_names())}"),
        *(
            ({"tile": tile}, ValueError, f"tile is {tile!r}, expected rows x keys, such as '64x64', '64x64x2'")
            for tile in (
                "banana",
                "64",
                "x64",
                "64x",
                "64x64x",
                "64x64x2x2",
                "0x64",
                "-64x64",
                "64 x 64",
                "64X64",
                "²x²",
            )
        ),
        ({"kernel": 3}, TypeError, "kernel is 3 (int), expected a str"),
        ({"tile": (64, 64)}, TypeError, "tile is (64, 64) (tuple), expected a str"),
        ({"log": 1}, TypeError, "log is 1 (int), expected a bool"),
        ({"log": "yes"}, TypeError, "log is 'yes' (str), expected a bool"),
        *(
            ({name: 3}, TypeError, f"options() got an unexpected keyword argument {name!r}; {hint}")
            for name, hint in {
                "kernal": "did you mean kernel?",
                "Tile": "did you mean tile?",
                "threads": "expected one of kernel, log, tile",
                "page_size": "KVCache takes it",
            }.items()
        ),
    ],
)
def test_wrong_options_raise_at_once(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        cuflash.options(**wrong)


def test_positional_options_are_refused() -> None:
    with pytest.raises(TypeError, match="positional"):
        cuflash.options("cpu")  # type: ignore[misc]


def in_a_new_process(code: str, **environment: str) -> str:
    """What a program prints, or the last line of its error."""
    run = subprocess.run(
        [sys.executable, "-c", "import numpy as np, cuflash\nx = np.ones((2, 5, 8), np.float32)\n" + code],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )
    return run.stdout + run.stderr if run.returncode == 0 else run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CUFLASH_KERNEL": "forward_scalar", "CUFLASH_TILE": "32x32"}, Settings("forward_scalar", "32x32", False)),
        ({"CUFLASH_LOG": "1"}, Settings("", "", True)),
        ({"CUFLASH_LOG": "0"}, AUTOMATIC),
        ({"CUFLASH_LOG": ""}, AUTOMATIC),
    ],
    ids=str,
)
def test_environment_gives_the_defaults(environment: dict[str, str], expected: Settings) -> None:
    code = "from cuflash.settings import settings; print(settings())"
    assert in_a_new_process(code, **environment) == f"{expected}\n"


@pytest.mark.parametrize(
    ("value", "expected"), [("0", "ieee"), ("1", "tf32"), (" 1 ", "tf32"), ("2", "tf32"), ("", "ieee"), ("yes", "ieee")]
)
def test_tf32_is_allowed_by_what_allows_it_to_cupy(value: str, expected: str) -> None:
    code = "from cuflash.settings import FLOAT32_PRECISION; print(FLOAT32_PRECISION)"
    assert in_a_new_process(code, CUPY_TF32=value) == f"{expected}\n"


def test_options_override_the_environment() -> None:
    code = "with cuflash.options(kernel='cpu', log=True): cuflash.attention(x, x, x)"
    printed = in_a_new_process(code, CUFLASH_KERNEL="forward_scalar")
    assert printed == "cuflash: attention float32, batch 1, heads 2/2, 5 x 5, head_dim 8 -> cpu\n"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CUFLASH_KERNEL": "forward_scalar"}, "ValueError: kernel 'forward_scalar' cannot serve this call: "),
        ({"CUFLASH_TILE": "64x64"}, "ValueError: tile '64x64' cannot serve this call: "),
    ],
    ids=str,
)
def test_environment_reaches_calls(environment: dict[str, str], words: str) -> None:
    assert in_a_new_process("cuflash.attention(x, x, x)", **environment).startswith(words)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CUFLASH_KERNEL": "foo"}, f"CUFLASH_KERNEL is 'foo', expected one of {', '.join(kernel_names())}"),
        (
            {"CUFLASH_TILE": "banana"},
            "CUFLASH_TILE is 'banana', expected rows x keys, such as '64x64', '64x64x2' (two buffers), "
            "'64x64p' (prepared), '64x64w' (blocks walk on)",
        ),
        ({"CUFLASH_LOG": "yes"}, "CUFLASH_LOG is 'yes', expected '0' or '1'"),
        ({"CUFLASH_NUM_THREADS": "many"}, "CUFLASH_NUM_THREADS is 'many', expected a positive int"),
        ({"CUFLASH_DUMP": __file__}, f"CUFLASH_DUMP is {__file__!r}, which is a file, expected a folder"),
        ({"CUFLASH_NUM_THREADS": "0"}, "CUFLASH_NUM_THREADS is '0', expected a positive int"),
    ],
    ids=str,
)
def test_environment_that_no_call_could_use_fails_at_import(environment: dict[str, str], words: str) -> None:
    assert in_a_new_process("print('imported')", **environment) == f"ValueError: {words}"
    command = [sys.executable, "-m", "cuflash", "doctor"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"cuflash: {words}\n")


def test_every_tile_can_be_chosen() -> None:
    x = np.ones((2, 5, 8), np.float16)
    for capability in (61, 75, 80, 90, 120):
        for spec in KERNELS:
            problem, device = describe_attention(x, x, x)[0], device_of(capability)
            if spec.refusal(problem.traits, device) is None:
                for tile in spec.tiles(problem.traits, device):
                    with cuflash.options(kernel=spec.name, tile=str(tile)):
                        assert make_plan(problem, device, settings()).tile.block_m == tile.block_m


def test_kernels_of_other_operations_refuse() -> None:
    problem = describe_attention(X, X, X)[0]
    for spec in GATED_KERNELS:
        words = f"kernel '{spec.name}' cannot serve this call: does not implement attention"
        with pytest.raises(ValueError, match=words):
            make_plan(problem, device_of(90), Settings(spec.name, "", False))


def test_log_is_one_line_per_call(capsys: pytest.CaptureFixture[str]) -> None:
    with cuflash.options(log=True):
        cuflash.attention(X, X, X)
    with cuflash.options(log=np.True_):
        cuflash.attention(X, X, X, softcap=3)
    assert capsys.readouterr().err.splitlines() == [
        "cuflash: attention float32, batch 1, heads 2/2, 5 x 5, head_dim 8 -> cpu",
        "cuflash: attention float32, batch 1, heads 2/2, 5 x 5, head_dim 8, softcap 3 -> cpu",
    ]


def test_log_is_silent_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    cuflash.attention(X, X, X)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert num_threads() == usable
    for text in ("", "1", "7"):
        monkeypatch.setenv("CUFLASH_NUM_THREADS", text)
        assert num_threads() == (int(text) if text else usable)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", " ", "²"])
def test_num_threads_must_be_positive(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_NUM_THREADS", text)
    with pytest.raises(ValueError, match=f"CUFLASH_NUM_THREADS is '{re.escape(text)}', expected a positive int"):
        num_threads()


@pytest.mark.parametrize("length", [0, 4])
def test_num_threads_is_checked_before_anything_is_written(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "0")
    tokens, out, lse = np.ones((9, 2, 8)), np.full((9, 2, 8), 7.0), np.full((9, 2), 7.0)
    with pytest.raises(ValueError, match="CUFLASH_NUM_THREADS is '0', expected a positive int"):
        cuflash.attention_varlen(tokens, tokens, tokens, np.array([0, length]), out=out, lse=lse)
    assert (out == 7).all() and (lse == 7).all()


def test_results_do_not_depend_on_num_threads(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    q, k, v = rng.standard_normal((3, 3, 300, 16), dtype=np.float32)
    results = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("CUFLASH_NUM_THREADS", threads)
        results.append(cuflash.attention(q, k, v, causal=True).tobytes())
    assert len(set(results)) == 1


def test_dump_writes_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(describe_attention(X, X, X)[0], device_of(90), AUTOMATIC)
    text = entry_text(plan.program)
    dump(plan.kernel, text)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("CUFLASH_DUMP", str(tmp_path / "new" / "folder"))
    for _ in range(2):
        dump(plan.kernel, text)
    dump(plan.kernel, text + "\n")
    written = sorted((tmp_path / "new" / "folder").iterdir())
    assert len(written) == 2
    assert {path.read_text() for path in written} == {text, text + "\n"}
    assert all(path.name.startswith(f"{plan.kernel}_") and path.suffix == ".cu" for path in written)


@pytest.mark.gpu
def test_dump_happens_when_a_kernel_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from cuflash.gpu import compile as compile_module

    monkeypatch.setattr(compile_module, "_functions", {})
    monkeypatch.setenv("CUFLASH_DUMP", str(tmp_path))
    x = cupy.asarray(X)
    cuflash.warmup(cuflash.attention, x, x, x)
    (written,) = tmp_path.iterdir()
    assert written.read_text() == cuflash.explain(cuflash.attention, x, x, x).source


@pytest.mark.gpu
def test_log_names_kernel_and_tile_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    import cupy

    x = cupy.asarray(X)
    with cuflash.options(log=True):
        for _ in range(3):
            cuflash.attention(x, x, x)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    assert re.fullmatch(r"cuflash: attention float32, .* -> forward_scalar tile \d+x\d+, .*", lines[0])


@pytest.mark.gpu
def test_options_are_not_mixed_up_by_the_launch_cache() -> None:
    import cupy

    x = cupy.asarray(X)
    for _ in range(2):
        cuflash.attention(x, x, x)
        with cuflash.options(tile="63x64"), pytest.raises(ValueError, match="tile '63x64' cannot serve this call"):
            cuflash.attention(x, x, x)
        with cuflash.options(kernel="cpu"), pytest.raises(ValueError, match="kernel 'cpu' cannot serve this call"):
            cuflash.attention(x, x, x)


def test_every_variable_has_one_place() -> None:
    """What the code reads is what `KNOBS` lists, and each is explained."""
    named = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r'"(CUFLASH_[A-Z_]+)"', path.read_text())}
    macros = {"CUFLASH_FLOAT16", "CUFLASH_BFLOAT16", "CUFLASH_FLOAT32", "CUFLASH_FLOAT64"}
    assert named - macros == {knob.variable for knob in KNOBS}
    assert all(len(knob.meaning) > 20 for knob in KNOBS)


def test_read_takes_the_environment_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("CUFLASH_COMPILE") == "import"
    monkeypatch.setenv("CUFLASH_COMPILE", "lazy")
    assert read("CUFLASH_COMPILE") == "lazy"
    with pytest.raises(KeyError):
        read("CUFLASH_NO_SUCH_THING")
