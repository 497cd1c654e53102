"""The same bits whoever computes: one thread, several, processes, and workers of a cluster, one of which is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("dask.array")

PROGRAM = """
import hashlib, json, os, signal, sys, time

import dask
import dask.array as da
import ml_dtypes
import numpy as np

import cuflash.dask


def slowly(x):
    time.sleep(0.05)
    return x


def call(dtype, slow=False):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((4, n, 24)).astype(dtype) for n in (400, 900, 900))
    # Chunks of transposed arrays lie in memory as they like, until they are sent to another process.
    k, v = (np.ascontiguousarray(x.swapaxes(-1, -2)) for x in (k, v))
    k, v = (da.from_array(x, chunks=(2, 24, 70)).swapaxes(-1, -2) for x in (k, v))
    if slow:
        k = k.map_blocks(slowly, dtype=k.dtype, meta=k._meta)
    bias, sinks = rng.standard_normal((400, 900)), np.ones(4)
    q = da.from_array(q, chunks=(2, 150, 24))
    return cuflash.dask.attention(q, k, v, causal=True, bias=bias, sinks=sinks, softcap=5, return_lse=True)


def digest(results):
    return hashlib.sha256(b"".join(x.tobytes() for x in results)).hexdigest()


def killed(client):
    # While tasks run, and the worker holds results that others need.
    futures = client.compute(list(call("float64", slow=True)))
    while True:
        time.sleep(0.01)
        assert not any(future.done() for future in futures), "too quick to be disturbed"
        for address, keys in client.has_what().items():
            held = [key for key in keys if "attention-attend" in str(key)]
            if len(held) >= 2:
                workers = client.run(os.getpid)
                os.kill(workers[address], signal.SIGKILL)
                results = client.gather(futures)
                assert workers[address] not in client.run(os.getpid).values()
                return digest(results)


if __name__ == "__main__":
    dtypes = "float64", ml_dtypes.bfloat16
    found = {
        scheduler: [digest(dask.compute(*call(dtype), scheduler=scheduler, num_workers=3)) for dtype in dtypes]
        for scheduler in ("synchronous", "threads", "processes")
    }
    found["again"] = [digest(dask.compute(*call(dtype), scheduler="threads", num_workers=2)) for dtype in dtypes]
    if "cluster" in sys.argv:
        from distributed import Client, LocalCluster

        with LocalCluster(
            n_workers=3, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        ) as cluster, Client(cluster) as client:
            found["cluster"] = [digest(dask.compute(*call(dtype))) for dtype in dtypes]
            found["killed"] = [killed(client), found["cluster"][1]]
    print(json.dumps(found))
"""


@pytest.mark.parametrize("cluster", [False, True], ids=["dask", "cluster"])
def test_same_bits(cluster: bool, tmp_path: Path) -> None:
    if cluster:
        # Not by its name: a folder of tests may have it, too.
        from importlib.metadata import PackageNotFoundError, version

        try:
            version("distributed")
        except PackageNotFoundError:
            pytest.skip("distributed is not installed: pip install distributed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), *(["cluster"] if cluster else [])]
    run = subprocess.run(command, env=os.environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert set(found) >= ({"cluster", "killed"} if cluster else {"threads", "processes"})
    assert all(digests == found["synchronous"] for digests in found.values()), found
