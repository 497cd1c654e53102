"""Ranks that are processes, started by mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mpi4py")

PROGRAM = Path(__file__).parent / "program.py"
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
pytestmark = pytest.mark.skipif(MPIEXEC is None, reason="mpiexec is not installed")


def mpiexec(size: int, *arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    assert MPIEXEC is not None, "skipped otherwise"
    # One thread each: the ranks share the machine's cores. Open MPI refuses root and more ranks than cores.
    allowed = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    environment = {**os.environ, **allowed, "OMPI_MCA_rmaps_base_oversubscribe": "1", "CUFLASH_NUM_THREADS": "1"}
    command = [MPIEXEC, "-n", str(size), sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


def ranks(size: int, task: str) -> str:
    found = mpiexec(size, str(PROGRAM), task)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_bits_do_not_depend_on_the_number_of_processes() -> None:
    digests = {ranks(size, "bits") for size in (1, 2, 4)}
    assert len(digests) == 1 and digests.pop().startswith("digest ")


def test_messages_in_pieces() -> None:
    assert ranks(3, "large").count("right") == 3


def test_an_error_of_one_process_is_raised_in_all() -> None:
    found, message = ranks(2, "error"), "v has 10 keys (axis -2) but k has 9"
    assert found.count(message) == 2 and found.count(f"rank 1 raised ValueError: {message}") == 1


def test_a_rank_that_does_not_come() -> None:
    assert ranks(2, "late").strip() == "rank 0 waited for all ranks to call for 0.5 seconds"


def test_keys_that_do_not_come() -> None:
    assert "rank 0 waited for keys from or to rank 1 for 0.5 seconds" in ranks(2, "stuck")


def test_a_process_that_ends() -> None:
    found = mpiexec(2, str(PROGRAM), "dies")
    assert found.returncode != 0 and "went on" not in found.stdout


@pytest.mark.parametrize("options", [[], ["--full", "--layout", "contiguous", "--dtype", "float16"]])
def test_try(options: list[str]) -> None:
    found = mpiexec(2, "-m", "cuflash.distributed", "--try", "--backend", "numpy", "--seqlen", "300", *options)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0].startswith("2 ranks, MPI and NumPy") and lines[-1] == "all is well"
    assert ("causal" in lines[1]) == (not options)
