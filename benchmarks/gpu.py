"""Everything that needs a GPU, in one run: tests, sanitizers, benchmarks; the summary comes last.

python benchmarks/gpu.py [tests] [sanitize] [bench] [--quick] [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from cuflash.kernels import KERNELS

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", "tests", "-m"]


def _run(name: str, command: list[str], logs: Path) -> tuple[subprocess.Popen[bytes], Path]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    log = logs / f"{name}.log"
    with log.open("wb") as stream:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT), log


def _finish(name: str, started: tuple[subprocess.Popen[bytes], Path], begin: float) -> tuple[bool, str]:
    process, log = started
    status = process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    if name == "bench" and "summary:" in lines:
        shown = lines[len(lines) - 1 - lines[::-1].index("summary:") :]
    else:
        shown = lines[-1:] if status == 0 else lines[-25:]
    return (
        status == 0,
        f"{name}: {'ok' if status == 0 else 'FAILED'} ({time.perf_counter() - begin:.0f} s)\n  " + "\n  ".join(shown),
    )


def main() -> int:
    """Run the steps; exit status 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", nargs="*", help="tests, sanitize, bench (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer problems in the benchmark")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu-logs", help="folder for the full output")
    parser.add_argument("--tools", nargs="*", default=TOOLS, help="which of compute-sanitizer's tools")
    parser.add_argument("--kernels", nargs="*", default=[spec.name for spec in KERNELS], help="for the sanitizer")
    parser.add_argument("--cases", nargs="*", default=[], help="parts of case names for the sanitizer")
    arguments = parser.parse_args()
    steps = arguments.steps or ["tests", "sanitize", "bench"]
    logs = arguments.logs.resolve()  # the steps run in another folder
    logs.mkdir(parents=True, exist_ok=True)
    summary = []
    for step in steps:
        begin = time.perf_counter()
        if step == "tests":
            # What measures time runs alone, after the others.
            workers = ["-n", str(min(8, os.cpu_count() or 1))]
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
            command = [sys.executable, "-m", "cuflash", "bench", "--backend", "gpu", "--json", str(logs / "bench.json")]
            if arguments.quick:
                command.append("--quick")
            summary.append(_finish("bench", _run("bench", command, logs), begin))
    print("\n".join(text for _, text in summary))
    return 0 if all(good for good, _ in summary) else 1


if __name__ == "__main__":
    sys.exit(main())
