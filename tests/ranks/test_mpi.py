"""Ranks that are processes, started by mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuflash.distributed.__main__ import main
from cuflash.gpu import installed

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
    """When it comes it hears why, and nobody goes on with what is left of the call."""
    found = ranks(2, "late")
    assert found.count("rank 0 waited for all ranks to call for 0.5 seconds") == 2
    assert found.count("rank 0 raised TimeoutError") == 1
    assert found.count("an earlier call with this communicator ended by TimeoutError: pass another communicator") == 1


def test_a_rank_that_never_comes() -> None:
    found = ranks(2, "first")
    assert "rank 0 waited for all ranks to call for 0.5 seconds" in found
    assert "ranks did not come to make a channel of this communicator: pass another communicator" in found


def test_keys_that_do_not_come() -> None:
    assert "rank 0 waited for keys from or to rank 1 for 0.5 seconds" in ranks(2, "stuck")


@pytest.mark.parametrize(("task", "error"), [("memory", "MemoryError: no more"), ("interrupt", "KeyboardInterrupt: ")])
def test_a_rank_that_ends_in_the_middle(task: str, error: str) -> None:
    found = ranks(3, task)
    assert "went on" not in found
    assert found.count(f"RankError: rank 1 raised {error}") == 2
    assert found.count(f"an earlier call with this communicator ended by {error.partition(':')[0]}") == 1
    assert found.count("an earlier call with this communicator ended by RankError") == 2


def test_wrong_arguments_of_one_process() -> None:
    assert ranks(2, "wrong").splitlines() == [
        "rank 1 raised ValueError: timeout is 0, expected seconds above 0, or None",
        "rank 1 raised TypeError: timeout is a str, expected seconds, or None",
        "rank 1 raised TypeError: attention() of several processes takes no workspace; cuflash.attention does",
        "rank 1 raised TypeError: attention() got an unexpected keyword argument 'is_causal'; cuflash calls it causal "
        "(True lets the last query see the last key; 'top_left' lines up the first ones, as PyTorch does)",
        "rank 1 raised OSError: no number",
    ]


def test_communicators() -> None:
    found = ranks(2, "communicators")
    assert found.count("expected an intracommunicator") == 4
    assert found.count("expected a communicator: of mpi4py") == 2


def test_a_process_that_ends() -> None:
    found = mpiexec(2, str(PROGRAM), "dies")
    assert found.returncode != 0 and "went on" not in found.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seqlen", "0"], "argument --seqlen: 0 is not a positive int"),
        (["--heads", "-1"], "argument --heads: -1 is not a positive int"),
        ([], "the following arguments are required: --try"),
    ],
)
def test_try_what_cannot_be(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*options, *(["--try"] if options else [])])
    assert message in capsys.readouterr().err


def test_try_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(installed, "load_driver", lambda: None)
    with pytest.raises(SystemExit):
        main(["--try", "--backend", "gpu"])
    assert "no CUDA driver" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--full", "--layout", "contiguous", "--dtype", "float16"]])
def test_try(options: list[str]) -> None:
    found = mpiexec(2, "-m", "cuflash.distributed", "--try", "--backend", "numpy", "--seqlen", "300", *options)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0].startswith("2 ranks, MPI and NumPy") and lines[-1] == "all is well"
    assert ("causal" in lines[1]) == (not options)
