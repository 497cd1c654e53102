"""Ranks whose arrays are on GPUs: threads that share one, processes that share one by MPI, processes with NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuflash import distributed
from cuflash.distributed import shard, unshard
from cuflash.problem.arrays import DTYPES

from .test_ring import EPS, OPTIONS, assert_right
from .threads import run_ranks, use_links

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", EPS)
def test_options(dtype: str, name: str, layout: Any, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """As with NumPy, by threads that take turns on one GPU; and the same bits for 1, 2 and 4 ranks."""
    import cupy

    use_links(monkeypatch)
    lengths = (4, 64), (2, 96), (2, 96)
    arrays = [rng.standard_normal((2, heads, n, 16)).astype(DTYPES[dtype]) for heads, n in lengths]
    options = {key: x[..., :96] if key in ("bias", "mask") else x for key, x in OPTIONS[name].items()}
    found = []
    for size in (1, 2, 4):

        def call(rank: int, comm: Any) -> Any:
            mine = [cupy.asarray(shard(x, rank, comm.size, layout=layout)) for x in arrays]
            there = {key: cupy.asarray(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
            given: dict[str, Any] = {"layout": layout, "num_parts": 4 // comm.size, "return_lse": True}
            return [x.get() for x in distributed.attention(mine[0], mine[1], mine[2], comm, **given, **there)]

        outs, lses = zip(*run_ranks(size, call)[0], strict=True)
        found.append((unshard(outs, layout=layout), unshard(lses, axis=-1, layout=layout)))
    assert_right(dtype, found[0], arrays, **options)
    for out, lse in found[1:]:
        assert out.tobytes() == found[0][0].tobytes() and lse.tobytes() == found[0][1].tobytes()


def test_states_allocate_what_they_say(allocations: Any, rng: np.random.Generator) -> None:
    import cupy

    from cuflash import states

    q, k, v = (cupy.asarray(rng.standard_normal((4, 300, 64)).astype(np.float16)) for _ in range(3))
    states.attend(q, k, v)
    with allocations() as sizes:
        states.attend(q, k, v)
    assert sizes[:2] == [4 * 300 * 64 * 4, 4 * 300 * 3 * 4]


RANK = """
import sys
from mpi4py import MPI
import cupy, numpy as np, cuflash
from cuflash.distributed import attention, shard
from cuflash.gpu.nccl import communicator_by_mpi
world = MPI.COMM_WORLD
comm = communicator_by_mpi(world) if sys.argv[1] == "nccl" else world
for dtype in (np.float16, np.float32, np.float64):
    whole = np.random.default_rng(0).standard_normal((3, 4, 640, 64)).astype(dtype)
    for options in ({}, {"causal": True}, {"window": (100, 0)}):
        mine = [cupy.asarray(shard(x, world.rank, world.size, layout="zigzag")) for x in whole]
        out = attention(*mine, comm, layout="zigzag", **options)
        again = attention(*mine, comm, layout="zigzag", **options)
        assert (out.view(np.uint8) == again.view(np.uint8)).all()
        expected = shard(cuflash.attention(*whole, **options), world.rank, world.size, layout="zigzag")
        error = np.abs(out.get().astype(np.float64) - expected.astype(np.float64)).max()
        assert error <= 8 * np.finfo(dtype).eps, (dtype, options, error)
print("right")
"""


LATE = """
import time
from mpi4py import MPI
import cupy, numpy as np
from cuflash.distributed import attention, ring
from cuflash.gpu.nccl import communicator_by_mpi
world = MPI.COMM_WORLD
x = np.ones((4, 640, 64), np.float16)
for _ in range(2):
    comm = communicator_by_mpi(world)
    mine = cupy.asarray(x)
    attention(mine, mine, mine, comm)
    if world.rank == 1:
        begin, ring._begin = ring._begin, lambda *given: time.sleep(5)  # its keys do not come
    began = time.monotonic()
    try:
        attention(mine, mine, mine, comm, timeout=1.5)
    except (TimeoutError, TypeError) as error:
        assert world.rank == 1 or "rank 0 waited for keys from or to rank 1 for 1.5 seconds" in str(error)
        assert world.rank == 1 or time.monotonic() - began < 4
    else:
        raise AssertionError("no error")
    if world.rank == 1:
        ring._begin = begin
    cupy.cuda.runtime.deviceSynchronize()
    world.Barrier()
print("right")
"""


def run_two(script: str, by: str, folder: Path) -> None:
    """Run a program by two ranks, both of which must find it right."""
    import cupy

    pytest.importorskip("mpi4py")
    from .test_mpi import MPIEXEC

    if MPIEXEC is None:
        pytest.skip("mpiexec is not installed")
    if by == "nccl" and cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU: NCCL has none for a second rank")
    path = folder / "rank.py"
    path.write_text(script)
    command = [MPIEXEC, "-n", "2", sys.executable, str(path), by]
    environment = {**os.environ, "CUFLASH_COMPILE": "lazy"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("right") == 2


@pytest.mark.parametrize("by", ["mpi", "nccl"])
def test_processes(by: str, tmp_path: Path) -> None:
    run_two(RANK, by, tmp_path)


def test_keys_that_do_not_come(tmp_path: Path) -> None:
    """NCCL itself would wait for ever."""
    run_two(LATE, "nccl", tmp_path)
