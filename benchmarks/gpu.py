"""Everything that needs a GPU, in one run: tests, sanitizers, benchmarks; the summary comes last.

python benchmarks/gpu.py [tests] [sanitize] [bench] [accuracy] [sweep] [--quick] [--logs FOLDER] [--results FOLDER]

The benchmark measures the GPU, then the NumPy back end on two cores, so that both results are of the same sources; so
does `accuracy`, the error table; `sweep` compares the GPU with naive CuPy and PyTorch's math on many sizes.
`--results benchmarks/results` replaces what is stored; `python benchmarks/readme.py` and `python
benchmarks/performance.py` show it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cuflash.plan.names import kernel_names

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "--thorough", "tests", "-m"]
BENCH = [sys.executable, "-m", "cuflash", "bench", "--peers", str(ROOT / "benchmarks" / "peers.py")]
RUNS = {
    "bench": (["gpu", "numpy"], []),
    "accuracy": (["gpu", "numpy"], ["--group", "accuracy"]),
    "sweep": (["gpu"], ["--group", "sweep", "--only-peers", "naive", "math"]),
}
"""By step: back ends that are measured, and options of the benchmark. All but the first have folders of their own."""
CPU_THREADS = 2
"""Cores for the NumPy back end, so that machines of any size can be compared."""


def _run(
    name: str, command: list[str], logs: Path, variables: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Path]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment |= variables or {}
    log = logs / f"{name}.log"
    with log.open("wb") as stream:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT), log


def _finish(name: str, started: tuple[subprocess.Popen[bytes], Path], begin: float) -> tuple[bool, str]:
    process, log = started
    status = process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    if name.partition("-")[0] in RUNS and "summary:" in lines:
        shown = lines[len(lines) - 1 - lines[::-1].index("summary:") :]
    else:
        shown = lines[-1:] if status == 0 else lines[-25:]
    return (
        status == 0,
        f"{name}: {'ok' if status == 0 else 'FAILED'} ({time.perf_counter() - begin:.0f} s)\n  " + "\n  ".join(shown),
    )


def few_cores(count: int) -> set[int]:
    """Choose usable cores, no two of them threads of one physical core as long as there are others."""
    first, second = [], []
    taken: set[str] = set()
    for core in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        name = siblings.read_text() if siblings.is_file() else str(core)
        (second if name in taken else first).append(core)
        taken.add(name)
    return set([*first, *second][:count])


def bench_gpu(step: str, results: Path, logs: Path, options: list[str]) -> tuple[bool, str]:
    """Measure the GPU back end and store the results under the GPU's name."""
    begin = time.perf_counter()
    stored = results / "gpu.json"
    command = [*BENCH, "--backend", "gpu", "--json", str(stored), *options]
    finished = _finish(f"{step}-gpu", _run(f"{step}-gpu", command, logs), begin)
    if stored.is_file():
        model = json.loads(stored.read_text())["device"].split()[-1].lower()
        stored.replace(results / f"{model}.json")
    return finished


def bench_cpu(step: str, results: Path, logs: Path, options: list[str]) -> tuple[bool, str]:
    """Measure the NumPy back end, and its peers, on `CPU_THREADS` cores."""
    begin = time.perf_counter()
    command = [*BENCH, "--backend", "numpy", "--json", str(results / "cpu.json")]
    # Nothing but the cores limits NumPy's own BLAS and the peers as well; a process inherits them.
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, few_cores(CPU_THREADS))
    variables = {"CUFLASH_NUM_THREADS": str(CPU_THREADS), "CUFLASH_COMPILE": "lazy"}
    try:
        started = _run(f"{step}-cpu", [*command, *options], logs, variables)
    finally:
        os.sched_setaffinity(0, usable)
    return _finish(f"{step}-cpu", started, begin)


def main() -> int:
    """Run the steps; exit status 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", help=f"tests, sanitize, {', '.join(RUNS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer problems in the benchmark")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu-logs", help="folder for the full output")
    parser.add_argument("--results", type=Path, help="folder for what the benchmark stores; default: that of the logs")
    parser.add_argument("--backends", nargs="*", choices=("gpu", "numpy"), default=("gpu", "numpy"), help="to measure")
    workers = min(8, os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=workers, help=f"processes for the tests (default: {workers})")
    parser.add_argument("--tools", nargs="*", default=TOOLS, help="which of compute-sanitizer's tools")
    parser.add_argument("--kernels", nargs="*", default=kernel_names()[:-1], help="for the sanitizer")
    parser.add_argument("--cases", nargs="*", default=[], help="parts of case names for the sanitizer")
    arguments = parser.parse_args()
    steps = arguments.steps or ["tests", "sanitize", *RUNS]
    logs = arguments.logs.resolve()  # the steps run in another folder
    logs.mkdir(parents=True, exist_ok=True)
    results = (arguments.results or logs).resolve()
    results.mkdir(parents=True, exist_ok=True)
    summary = []
    for step in steps:
        begin = time.perf_counter()
        if step == "tests":
            # What measures time runs alone, after the others. One process compiles first, and others take its share.
            workers = ["-n", str(arguments.workers), "--dist", "worksteal"]
            # What the import compiles is compiled once, not by each process.
            subprocess.run([sys.executable, "-c", "import cuflash"], cwd=ROOT, check=True)
            summary.append(_finish("tests", _run("tests", [*PYTEST, "gpu and not alone", *workers], logs), begin))
            begin = time.perf_counter()
            summary.append(_finish("tests-alone", _run("tests-alone", [*PYTEST, "gpu and alone"], logs), begin))
        elif step == "sanitize":
            tool = shutil.which("compute-sanitizer")
            if tool is None:
                summary.append((False, "sanitize: FAILED, compute-sanitizer is not on the PATH"))
                continue
            # Beside one another: each is bound by one core of the host.
            started = {}
            for name, kernel in product(arguments.tools, arguments.kernels):
                run = [sys.executable, "benchmarks/sanitize.py", "--kernel", kernel, *arguments.cases]
                label = f"{name}-{kernel}"
                started[label] = _run(label, [tool, "--tool", name, "--error-exitcode", "1", *run], logs)
            summary += [_finish(label, process, begin) for label, process in started.items()]
        else:
            backends, options = RUNS[step]
            folder = results if step == "bench" else results / step
            folder.mkdir(exist_ok=True)
            benches = {"gpu": bench_gpu, "numpy": bench_cpu}
            for name in (name for name in arguments.backends if name in backends):
                quick = ["--quick"] if arguments.quick else []
                summary.append(benches[name](step, folder, logs, [*options, *quick]))
    print("\n".join(text for _, text in summary))
    return 0 if all(good for good, _ in summary) else 1


if __name__ == "__main__":
    sys.exit(main())
