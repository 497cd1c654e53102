"""What `import cuflash` does, costs and survives; each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cuflash
from cuflash.gpu.core import core_programs
from cuflash.plan.build import Program
from cuflash.plan.gated import make_gated_plan
from cuflash.plan.plan import Plan, make_plan
from cuflash.plan.table import device_of
from cuflash.problem.arrays import FLOAT_NAMES, stand_in
from cuflash.problem.describe import describe_attention
from cuflash.problem.describe_gated import describe_chunk_gated_delta_rule, describe_recurrent_gated_delta_rule
from cuflash.settings import AUTOMATIC

# The driver is looked for with ctypes: hiding or pretending it there makes machines with and without a GPU alike.
DRIVER = """
import ctypes
_load = ctypes.CDLL
class _Driver:
    def cuDriverGetVersion(version):
        version._obj.value = 13000
def _pretend(name, *args, **options):
    if name in ("libcuda.so.1", "nvcuda.dll"):
        if {installed}:
            return _Driver
        raise OSError(name)
    return _load(name, *args, **options)
ctypes.CDLL = _pretend
"""
WITHOUT_DRIVER, WITH_DRIVER = DRIVER.format(installed=False), DRIVER.format(installed=True)
WORKS = """
x = numpy.ones((3, 16), numpy.float32)
assert (cuflash.attention(x, x, x) == 1).all()
"""


def python(code: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    found = os.pathsep.join([*map(str, paths), os.environ["PYTHONPATH"]])
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": found, **environment},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run


def measure(code: str, **environment: str) -> Any:
    return json.loads(python(code, **environment).stdout)


def keeps_bytecode(folder: Path) -> dict[str, str]:
    """Variables with which a second import finds compiled modules, whatever the tests' own are told."""
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)}


def test_dir_shows_what_is_public() -> None:
    code = "import json, cuflash; print(json.dumps(dir(cuflash)))"
    assert measure(code) == sorted([*cuflash.__all__, "__version__"])
    assert all(hasattr(cuflash, name) for name in dir(cuflash))


def test_neither_cupy_nor_cuda_is_imported_without_a_driver() -> None:
    code = f"""
import json, sys, numpy
{WITHOUT_DRIVER}
import cuflash
{WORKS}
print(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))
"""
    imported = set(measure(code))
    assert "cuflash" in imported
    assert not imported & {"cupy", "cupyx", "cupy_backends", "cuda", "nvidia", "torch", "scipy", "numba"}


def test_import_without_a_driver_is_quick(tmp_path: Path) -> None:
    code = f"""
import time
{WITHOUT_DRIVER}
begin = time.thread_time()
import numpy
between = time.thread_time()
import cuflash
print((time.thread_time() - between) / (between - begin))
"""
    # By the processor's time, against another library's: other processes, and slow machines, change both.
    times = [measure(code, **keeps_bytecode(tmp_path)) for _ in range(6)]
    assert min(times[1:]) < 1.5, f"{min(times[1:]):.2f} times import numpy"


def test_import_is_silent_without_a_driver() -> None:
    done = python(f"{WITHOUT_DRIVER}\nimport cuflash, numpy\n{WORKS}")
    assert (done.stdout, done.stderr) == ("", "")


def fake_cupy(folder: Path, code: str) -> Path:
    (folder / "cupy").mkdir()
    (folder / "cupy" / "__init__.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    "error",
    [
        "ImportError('libnvrtc.so.13: cannot open shared object file')",
        "ModuleNotFoundError('No module named fastrlock', name='fastrlock')",
        "RuntimeError('CuPy is installed twice')",
        "OSError('the cache folder is read-only')",
    ],
)
def test_broken_cupy_is_a_warning(error: str, tmp_path: Path) -> None:
    folder = fake_cupy(tmp_path, f"raise {error}")
    done = python(f"{WITH_DRIVER}\nimport cuflash, numpy\n{WORKS}", folder)
    message = error.partition("'")[2].partition("'")[0]
    expected = f"cuflash could not compile its kernels at import: CuPy cannot be imported ({message}): "
    assert f"RuntimeWarning: {expected}" in done.stderr and "pip install 'cuflash[cuda13]'\n" in done.stderr


def test_missing_cupy_is_no_warning(tmp_path: Path) -> None:
    """A machine with a driver whose user wants NumPy only."""
    folder = fake_cupy(tmp_path, "raise ModuleNotFoundError('No module named cupy', name='cupy')")
    assert python(f"{WITH_DRIVER}\nimport cuflash, numpy\n{WORKS}", folder).stderr == ""


def test_driver_without_a_device_is_no_warning(tmp_path: Path) -> None:
    code = """
class cuda:
    is_available = staticmethod(lambda: False)
    class runtime:
        runtimeGetVersion = staticmethod(lambda: 13000)
        def getDeviceCount():
            raise RuntimeError('cudaErrorNoDevice: no CUDA-capable device is detected')
class ndarray: pass
"""
    folder = fake_cupy(tmp_path, code)
    assert python(f"{WITH_DRIVER}\nimport cuflash, numpy\n{WORKS}", folder).stderr == ""


def test_failing_device_is_a_warning(tmp_path: Path) -> None:
    code = """
class cuda:
    is_available = staticmethod(lambda: True)
    class runtime:
        def getDevice():
            raise RuntimeError('the device is gone')
class ndarray: pass
"""
    done = python(f"{WITH_DRIVER}\nimport cuflash, numpy\n{WORKS}", fake_cupy(tmp_path, code))
    assert "RuntimeWarning: cuflash could not compile its kernels at import: the device is gone" in done.stderr


def test_lazy_does_not_touch_cupy(tmp_path: Path) -> None:
    folder = fake_cupy(tmp_path, "raise RuntimeError('must not be imported')")
    code = f"{WITH_DRIVER}\nimport sys, cuflash, numpy\n{WORKS}\nassert 'cupy' not in sys.modules"
    assert python(code, folder, CUFLASH_COMPILE="lazy").stderr == ""


@pytest.mark.parametrize("value", ["later", "", "LAZY"])
def test_unknown_compile_mode_is_a_warning(value: str) -> None:
    done = python(f"{WITHOUT_DRIVER}\nimport cuflash, numpy\n{WORKS}", CUFLASH_COMPILE=value)
    assert f"UserWarning: CUFLASH_COMPILE is '{value}', expected 'import' or 'lazy'" in done.stderr
    assert "<string>" in done.stderr, "the warning must point at the program's own import"


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("CUFLASH_KERNAL", " (did you mean CUFLASH_KERNEL?)"),
        ("CUFLASH_Threads", " (did you mean CUFLASH_NUM_THREADS?)"),
        ("CUFLASH_SPEED", ""),
    ],
)
def test_misspelt_settings_are_a_warning(variable: str, hint: str) -> None:
    done = python(f"{WITHOUT_DRIVER}\nimport cuflash, numpy\n{WORKS}", **{variable: "1"})
    words = f"UserWarning: {variable} is set, and there is no such setting{hint}\n"
    assert done.stderr.count(words) == done.stderr.count("Warning") == 1
    assert "<string>" in done.stderr, "the warning must point at the program's own import"


class Usual:
    """A contiguous array of a call that programs make."""

    def __init__(self, dtype: str, *shape: int) -> None:
        self.dtype, self.shape = dtype, shape


def usual_programs(capability: int) -> set[Program]:
    """What calls of usual sizes need, of several batches and numbers of heads; long sequences aside."""
    device = device_of(capability)
    plans: list[Plan] = []
    gated: list[Program] = []
    for dtype in FLOAT_NAMES:
        for batch, heads, seqlen, head_dim in ((8, 12, 1024, 64), (2, 32, 2048, 128)):
            x = stand_in("q", Usual(dtype, batch, heads, seqlen, head_dim), 0)
            plans.append(make_plan(describe_attention(x, x, x)[0], device, AUTOMATIC))
    for dtype in ("float16", "bfloat16"):
        for batch, seqlen, num_heads_v in ((1, 8192, 32), (8, 1000, 16), (2, 2048, 32)):
            tokens, values = (stand_in("q", Usual(dtype, batch, seqlen, heads, 128), 0) for heads in (16, num_heads_v))
            gates = stand_in("beta", Usual("float32", batch, seqlen, num_heads_v), 0)
            state = stand_in("state", Usual("float32", batch, num_heads_v, 128, 128), 0)
            call = tokens, tokens, values, gates, gates
            for problem, _ in (
                describe_chunk_gated_delta_rule(*call),
                describe_chunk_gated_delta_rule(*call, initial_state=state, output_final_state=True),
                describe_recurrent_gated_delta_rule(*call, state),
            ):
                gated += [launch.program for launch in make_gated_plan(problem, device, AUTOMATIC).launches]
    ahead = [plan.preparation.program for plan in plans if plan.preparation is not None]
    return {*(plan.program for plan in plans), *ahead, *gated}


@pytest.mark.parametrize("capability", [75, 80, 86, 90, 120])
def test_usual_calls_need_what_is_compiled_at_import(capability: int) -> None:
    programs = core_programs(device_of(capability))
    assert set(programs) == usual_programs(capability) and len(set(programs)) == len(programs) <= 16


@pytest.mark.gpu
@pytest.mark.alone  # a warm import that is slow says what it waits for
def test_cold_import_prints_one_line_and_warm_import_none(tmp_path: Path) -> None:
    cold = python("import cuflash", CUPY_CACHE_DIR=str(tmp_path))
    assert re.fullmatch(r"cuflash: compiling \d+ kernels for sm_\w+, once .*, \d+\.\d s\n", cold.stderr)
    assert cold.stdout == ""
    warm = python("import cuflash", CUPY_CACHE_DIR=str(tmp_path))
    assert (warm.stdout, warm.stderr) == ("", "")


@pytest.mark.gpu
@pytest.mark.alone
def test_warm_import_is_quick(tmp_path: Path) -> None:
    code = """
import time, cupy
cupy.empty(1)
begin = time.perf_counter()
import cuflash
print(time.perf_counter() - begin)
"""
    environment = {"CUPY_CACHE_DIR": str(tmp_path), **keeps_bytecode(tmp_path)}
    measure(code, **environment)
    seconds = min(measure(code, **environment) for _ in range(5))
    assert seconds <= 0.25, f"{seconds:.3f} s above import cupy; cupy.empty(1)"


@pytest.mark.gpu
def test_lazy_compiles_nothing_until_a_call_needs_it(tmp_path: Path) -> None:
    code = """
import cuflash, cuflash.gpu.compile, cupy
assert not cuflash.gpu.compile._functions
x = cupy.ones((2, 5, 8), 'float32')
cuflash.attention(x, x, x)
assert len(cuflash.gpu.compile._functions) == 1
"""
    done = python(code, CUFLASH_COMPILE="lazy", CUPY_CACHE_DIR=str(tmp_path))
    assert done.stderr == ""


@pytest.mark.gpu
def test_no_usable_gpu_with_a_driver() -> None:
    done = python("import cuflash, numpy\n" + WORKS, CUDA_VISIBLE_DEVICES="")
    assert (done.stdout, done.stderr) == ("", "")
