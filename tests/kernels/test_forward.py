"""The case matrix on the NumPy back end and on every row of the kernel table."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cases import CASES, DTYPES, TF32_CASES, fitting, serves

import cuflash
from cuflash.gpu.compile import kernel_function
from cuflash.gpu.launch import device_info
from cuflash.plan.plan import make_plan
from cuflash.plan.table import KERNELS, KernelSpec
from cuflash.settings import Settings
from cuflash.testing import Case, check, describe, make_data, run


def _assert_right_twice(case: Case, dtype: str, xp: Any, *, rounds_weights: bool = False) -> None:
    data = make_data(case, dtype)
    first = run(case, data, xp)
    check(case, data, first, rounds_weights=rounds_weights)
    second = run(case, data, xp)
    assert first.out.tobytes() == second.out.tobytes() and first.lse.tobytes() == second.lse.tobytes(), "not repeatable"


def _assert_refused(case: Case, dtype: str, xp: Any) -> None:
    with pytest.raises(ValueError, match="cannot serve this call"):
        run(case, make_data(case, dtype), xp)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cpu(case: Case, dtype: str) -> None:
    _assert_right_twice(case, dtype, np)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile what the cases need in threads, which takes a fraction of the time that the tests one by one would.

    Of several processes the first one compiles; the others wait, and load what they need from CuPy's cache on disk:
    with all of it in each of them a GPU has no memory left.
    """
    import fcntl

    with (tmp_path_factory.getbasetemp().parent / "compiled.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            _compile_all()
            lock.write("done")


def _compile_all() -> None:
    device = device_info(0)

    def compile_one(spec: KernelSpec, case: Case, dtype: str) -> None:
        problem = describe(fitting(case, spec), dtype)
        if serves(spec, problem, device):
            kernel_function(make_plan(problem, device, Settings(spec.name, "", False)).program, 0)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(compile_one, spec, case, dtype) for spec in KERNELS for case in CASES for dtype in DTYPES]
        for job in jobs:
            job.result()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_gpu(spec: KernelSpec, case: Case, dtype: str, compiled: None) -> None:
    import cupy

    case = fitting(case, spec)
    with cuflash.options(kernel=spec.name):
        if serves(spec, describe(case, dtype), device_info(0)):
            _assert_right_twice(case, dtype, cupy, rounds_weights=spec.rounds_weights)
        else:
            _assert_refused(case, dtype, cupy)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TF32_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_tf32(spec: KernelSpec, case: Case) -> None:
    import cupy

    case = fitting(case, spec)
    with cuflash.options(kernel=spec.name):
        if serves(spec, describe(case, "float32"), device_info(0)):
            _assert_right_twice(case, "float32", cupy, rounds_weights=spec.rounds_weights)
        else:
            _assert_refused(case, "float32", cupy)


TILED = [case for case in CASES if case.name in ("everything", "packed-plain-True", "causal-200x131")]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", TILED, ids=lambda case: case.name)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_tiles(spec: KernelSpec, case: Case, dtype: str) -> None:
    """The three tallest tiles and the lowest, whichever the plan would take."""
    import cupy

    case = fitting(case, spec)
    problem, device = describe(case, dtype), device_info(0)
    if not serves(spec, problem, device):
        with cuflash.options(kernel=spec.name):
            _assert_refused(case, dtype, cupy)
        return
    names = list(dict.fromkeys(map(str, spec.tiles(problem.traits, device))))
    for name in {*names[:3], names[-1]}:
        with cuflash.options(kernel=spec.name, tile=name):
            _assert_right_twice(case, dtype, cupy, rounds_weights=spec.rounds_weights)
