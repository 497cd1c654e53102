"""`python -m cuflash bench`: speed and error of every kernel beside its limits and its peers.

The table of problems (`cases`), or one problem given on the command line, is measured on the GPU or on the NumPy
back end: first the gate, a comparison with float64 (`check`), then the speed (`measure`, `device`),
for each kernel and each peer. Results go to the terminal and, if asked, to JSON, Markdown and a picture.

Other libraries are not part of the package: they are compared where a file or a module of peers is named.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..cpu.execute import check_settings
from ..gpu.installed import choose_backend, gpu_available
from ..options import options
from ..plan.names import kernel_names
from ..plan.table import CPU_KERNEL
from ..problem.arrays import FLOAT_NAMES
from ..problem.describe import describe_attention
from ..settings import num_threads, settings
from . import cases as case_table
from . import report as reports
from . import sweep
from .accuracy import ACCURACY, accuracy
from .caches import CacheCase
from .cases import DEFAULT_GROUPS, GROUPS, OVERHEADS, Case
from .device import GpuBackend, NumpyBackend, measure_limits
from .gated import GatedCase
from .inputs import AnyCase, stand_ins
from .measure import Peer, Request, chosen, compile_ahead, measure
from .outputs import check_file, check_picture
from .overheads import SmallCalls, overheads

QUICK_SECONDS = 20.0
"""After this time a quick run begins no further problem; the last one, and the overheads, are done within 30 s."""
QUICK_REPEATS = 3
SHAPE_OPTIONS = ("batch", "heads", "kv_heads", "seqlen", "seqlen_k", "head_dim", "dtype", "causal")
"""Any of them measures one problem instead of the table."""


class Peers(NamedTuple):
    """What is measured beside the kernels."""

    attention: Mapping[str, Peer]
    gated: Mapping[str, Peer] = {}
    caches: Mapping[str, Peer] = {}
    small_calls: SmallCalls | None = None
    release: Callable[[], None] | None = None
    versions: Callable[[], dict[str, str]] | None = None

    def of(self, case: AnyCase) -> Mapping[str, Peer]:
        """Peers for the operation of a problem."""
        if isinstance(case, CacheCase):
            return self.caches
        return self.gated if isinstance(case, GatedCase) else self.attention


def load_peers(source: str | None, backend: str, words: Collection[str] | None = None) -> Peers:
    """Find other libraries to compare with.

    Parameters
    ----------
    source : str or None
        A Python file or the name of a module with a function ``peers(backend)``, which returns a mapping of names to
        `Peer` for attention; maybe with ``gated_peers(backend)``, the same for the gated delta rule, and
        ``cache_peers(backend)`` for caches of keys and values, ``small_calls(q)``
        (see `overheads.SmallCalls`), ``release()``, which gives unused memory back and is called behind each problem,
        and ``versions()`` of what it has imported. None, "none": no peers.
    backend : {"gpu", "numpy"}
    words : collection of str, optional
        Only peers whose names contain one of them.

    Raises
    ------
    ValueError
        There is no such file or module, it cannot be imported, or it has no such function.
    """
    if source in (None, "none"):
        if words:
            raise ValueError("--only-peers chooses of those that --peers names, expected both")
        return Peers({})
    path = Path(str(source))
    try:
        if path.suffix == ".py":
            spec = importlib.util.spec_from_file_location("cuflash_bench_peers", path)
            if spec is None or spec.loader is None:
                raise ImportError(f"{path} is no Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(str(source))
        extras = {name: getattr(module, name, None) for name in ("small_calls", "release", "versions")}
        gated, caches = (
            _chosen(getattr(module, name)(backend), words) if hasattr(module, name) else {}
            for name in ("gated_peers", "cache_peers")
        )
        peers = Peers(_chosen(module.peers(backend), words), gated, caches, **extras)
    except Exception as error:  # the file may do anything
        raise ValueError(f"--peers {path}: {type(error).__name__}: {error}") from error
    if words and not (peers.attention or gated or caches):
        raise ValueError(f"--only-peers: no peer's name in {path} contains {' or '.join(words)}")
    return peers


def _chosen(peers: Mapping[str, Peer], words: Collection[str] | None) -> dict[str, Peer]:
    return {name: peer for name, peer in peers.items() if words is None or any(word in name for word in words)}


def positive_int(text: str) -> int:
    """Read an argument of a command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive int")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    """Arguments of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m cuflash bench",
        usage="%(prog)s [options]; --help lists them",
        description="Check the kernels against float64, and measure them beside other libraries.",
    )
    parser.add_argument("--backend", choices=("gpu", "numpy"), help="default: gpu if there is one")
    parser.add_argument("--quick", action="store_true", help="a few problems, three repeats, 30 seconds in all")
    parser.add_argument("--group", nargs="+", choices=(*GROUPS, OVERHEADS, ACCURACY), help="parts of the table")
    kernels = (*kernel_names(), "all")
    parser.add_argument("--kernel", default="", choices=kernels, help="default: automatic choice")
    parser.add_argument("--tile", default="", help="such as 64x64; default: automatic choice")
    parser.add_argument(
        "--repeats",
        type=positive_int,
        help="timed runs, of which the median counts, fewer if they are slow; default: 9",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not compare with float64")
    parser.add_argument(
        "--peers",
        metavar="FILE_OR_MODULE",
        help="other libraries, such as benchmarks/peers.py of the repository; default: none",
    )
    parser.add_argument(
        "--only-peers", nargs="+", metavar="WORD", help="peers whose names contain one of these; default: all"
    )
    shape = parser.add_argument_group("one problem of attention instead of the table")
    shape.add_argument("--batch", type=positive_int, help="default: 1")
    shape.add_argument("--heads", type=positive_int, help="default: 16")
    shape.add_argument("--kv-heads", type=positive_int, help="default: as many as heads")
    shape.add_argument("--seqlen", type=positive_int, metavar="N", help="queries; default: 4096, with NumPy 2048")
    shape.add_argument("--seqlen-k", type=positive_int, metavar="N", help="keys; default: as many as queries")
    shape.add_argument("--head-dim", type=positive_int, help="default: 128")
    shape.add_argument("--dtype", choices=FLOAT_NAMES, help="default: float16, with NumPy float32")
    shape.add_argument("--causal", action="store_true", default=None)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="everything that was measured")
    output.add_argument("--markdown", type=Path, metavar="FILE", help="tables")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="picture; needs matplotlib")
    return parser


def single_case(arguments: argparse.Namespace, backend: str) -> Case:
    """The problem of the shape options; ValueError, from the call's own checks, if it cannot be."""
    heads = arguments.heads or 16
    seqlen = arguments.seqlen or (4096 if backend == "gpu" else 2048)
    dtype = arguments.dtype or ("float16" if backend == "gpu" else "float32")
    head_dim = arguments.head_dim or 128
    case = Case(
        "one problem", dtype, arguments.batch or 1, heads, arguments.kv_heads or heads, seqlen,
        arguments.seqlen_k or seqlen, head_dim, head_dim, bool(arguments.causal),
    )  # fmt: skip
    describe_attention(**stand_ins(case), **case.options)
    return case


def choose_cases(arguments: argparse.Namespace, backend: str) -> tuple[list[AnyCase], set[str]]:
    """Return the problems to measure, and the names of what is measured without problems: overheads, accuracy."""
    if any(getattr(arguments, name) is not None for name in SHAPE_OPTIONS):
        if arguments.group:
            raise ValueError("--group chooses from the table, the shape options measure one problem: give one of them")
        return [single_case(arguments, backend)], set()
    names = arguments.group or DEFAULT_GROUPS[backend]
    groups = [GROUPS[name] for name in names if name in GROUPS]
    cases = case_table.quick(groups, backend) if arguments.quick else [case for group in groups for case in group]
    return cases, {OVERHEADS, ACCURACY} & set(names)


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise ValueError for files that could not be written when everything is measured."""
    for name in ("json", "markdown", "plot"):
        path = getattr(arguments, name)
        if path is None:
            continue
        if not path.resolve().parent.is_dir():
            raise ValueError(f"--{name} {path}: there is no folder {path.resolve().parent}")
        if name == "plot" and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plot needs matplotlib: pip install matplotlib")
        try:
            (check_picture if name == "plot" else check_file)(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"--{name} {path}: {error}") from None


def run(
    cases: Sequence[AnyCase],
    extras: Collection[str],
    backend: NumpyBackend,
    request: Request,
    peers: Peers,
    deadline: float | None = None,
    stored: Path | None = None,
) -> reports.Report:
    """Measure, print each problem when it is done, and return what `--json` stores.

    Parameters
    ----------
    cases : sequence of AnyCase
    extras : collection of str
        What is measured beside them: `OVERHEADS`, `ACCURACY`.
    backend : NumpyBackend
        Or `GpuBackend`.
    request : Request
    peers : Peers
    deadline : float, optional
        The run is a quick one: no problem is begun after this time (`time.monotonic`).
    stored : Path, optional
        Written behind each problem, so that a run that is stopped leaves what it has.
    """
    if backend.name == "gpu":
        compile_ahead(cases, request)
    dtypes = list(dict.fromkeys(case.dtype for case in cases))
    report: reports.Report = {
        "format": 2,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "backend": backend.name,
        "device": backend.device_name(),
        "versions": backend.versions(),
        "verified": request.verify,
        "repeats": request.repeats,
        "problems": [],
    }
    if backend.name == "numpy":
        report["threads"] = num_threads()
    if cases:
        report["limits"] = measure_limits(backend, dtypes)
    print(reports.header(report), flush=True)
    for case in cases:
        if deadline is not None and time.monotonic() > deadline:
            report.setdefault("left_out", []).append(case.name)
            continue
        report["problems"].append(measure(case, backend, request, report["limits"], peers.of(case)))
        print(reports.block(report["problems"][-1]), flush=True)
        backend.release(peers.release)
        write_json(report, stored)
    measurements: dict[str, Callable[[bool], Any]] = {
        OVERHEADS: lambda quick: overheads(backend, peers.small_calls, quick),
        ACCURACY: lambda quick: accuracy(backend, peers.attention, quick),
    }
    for name in filter(extras.__contains__, measurements):
        try:
            report[name] = measurements[name](deadline is not None)
        except Exception as error:  # what was measured before is not lost
            report[f"{name}_failed"] = f"{type(error).__name__}: {error}"
    if peers.versions is not None:  # of what has been imported meanwhile
        report["versions"] |= peers.versions()
    return report


def write_json(report: reports.Report, path: Path | None) -> None:
    """Write everything that was measured."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")


def write(report: reports.Report, arguments: argparse.Namespace) -> None:
    """Write the files that were asked for."""
    write_json(report, arguments.json)
    if arguments.markdown is not None:
        arguments.markdown.write_text(reports.markdown(report) + "\n")
    if arguments.plot is not None:
        from .plot import save

        save(report, arguments.plot)


def main(args: list[str]) -> int:
    """Run the command; 1 if a result is wrong, if a call failed, or if nothing could be measured."""
    begin = time.monotonic()
    parser = make_parser()
    arguments = parser.parse_args(args)
    name = arguments.backend or ("gpu" if gpu_available() else "numpy")
    try:
        choose_backend("numpy" if name == "numpy" else "cupy")
        check_outputs(arguments)
        options(tile=arguments.tile)  # refuses what is no tile
        if name == "numpy":
            with chosen(CPU_KERNEL if arguments.kernel == "all" else arguments.kernel, arguments.tile):
                check_settings(settings())
        cases, extras = choose_cases(arguments, name)
        peers = load_peers(arguments.peers, name, arguments.only_peers)
    except (RuntimeError, TypeError, ValueError) as error:
        parser.error(str(error))
    repeats = arguments.repeats or (QUICK_REPEATS if arguments.quick else Request().repeats)
    request = Request(arguments.kernel, arguments.tile, repeats, not arguments.no_verify)
    backend = GpuBackend() if name == "gpu" else NumpyBackend()
    deadline = begin + QUICK_SECONDS if arguments.quick else None
    report = run(cases, extras, backend, request, peers, deadline, arguments.json)
    write(report, arguments)
    if report["problems"] or extras & set(report):
        print(f"\n{reports.markdown(report)}")
    print(f"\n{reports.summary(report)}")
    if sweep.problems(report):
        print(sweep.summary(report))
    return status(report)


def status(report: reports.Report) -> int:
    """Exit status for what was measured."""
    problems: list[dict[str, Any]] = report["problems"]
    served = any("refused" not in result for p in problems for result in p["results"] if "peer" not in result)
    if problems and not served:
        print("nothing was measured: no kernel serves these problems", file=sys.stderr)
        return 1
    failed = any(f"{name}_failed" in report for name in (OVERHEADS, ACCURACY))
    return 1 if failed or reports.bad_errors(report) or any(map(reports.bad, problems)) else 0
