"""Command line: python -m cuflash doctor | kernels | explain | bench | demo."""

from __future__ import annotations

import argparse
import sys

import numpy as np

from . import attention
from .arrays import DTYPES, FLOAT_NAMES
from .explain import explain, gpu_available, show_config
from .kernels import KERNELS


class _Shape:
    """A stand-in for an array."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.shape = shape
        self.dtype = dtype


def _doctor() -> int:
    """Print the configuration, then check one small call on each back end against float64."""
    show_config()
    from . import reference

    backends = [("NumPy", np)]
    if gpu_available():
        import cupy

        backends.append(("GPU", cupy))
    healthy = True
    rng = np.random.default_rng(0)
    for name, xp in backends:
        for dtype_name in FLOAT_NAMES:
            dtype = DTYPES[dtype_name]
            q, k, v = (rng.standard_normal((2, 77, 64)).astype(dtype) for _ in range(3))
            expected, _ = reference.attention(q, k, v, causal=True)
            try:
                out = attention(*(xp.asarray(x) for x in (q, k, v)), causal=True)
                out = (out if xp is np else out.get()).astype(np.float64)
            except Exception as error:  # the report must name every failure, whatever it is
                print(f"check: {name} {dtype_name} FAILED: {error}")
                healthy = False
                continue
            error_norm = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
            good = error_norm < {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 1e-14}[dtype_name]
            healthy &= good
            print(f"check: {name} {dtype_name} relative error {error_norm:.1e} {'ok' if good else 'WRONG'}")
    return 0 if healthy else 1


def _kernels() -> int:
    """List the table of kernels."""
    for spec in KERNELS:
        print(f"{spec.name}: {spec.summary}")
        print(f"  operations  {', '.join(spec.operations)}")
        print(f"  dtypes      {', '.join(spec.dtypes)}")
        print(f"  head_dim    1 to {spec.max_head_dim}")
        print(f"  features    {', '.join(sorted(spec.features))}")
        print(f"  GPUs        compute capability {spec.min_compute_capability / 10} and newer")
    print("cpu: NumPy arrays, every feature")
    return 0


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _window(text: str) -> tuple[int | None, ...]:
    return tuple(None if part.strip() == "none" else int(part) for part in text.split(","))


def _explain(arguments: argparse.Namespace) -> int:
    dtype = DTYPES[arguments.dtype]
    q = _Shape(arguments.q, dtype)
    k = _Shape(arguments.k or arguments.q, dtype)
    v = _Shape(arguments.v or arguments.k or arguments.q, dtype)
    try:
        explanation = explain(
            attention, q, k, v, causal=arguments.causal, window=arguments.window, softcap=arguments.softcap,
            device=arguments.device,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(explanation)
    if arguments.source:
        print(explanation.source)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m cuflash", description="Fused tiled attention for CuPy and NumPy arrays."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print the configuration and check every back end against float64")
    commands.add_parser("kernels", help="list the kernels")
    explain_parser = commands.add_parser("explain", help="say which kernel serves a call, and why")
    explain_parser.add_argument("--q", type=_integers, required=True, metavar="B,H,N,D", help="shape of q")
    explain_parser.add_argument("--k", type=_integers, metavar="B,H,N,D", help="shape of k (default: that of q)")
    explain_parser.add_argument("--v", type=_integers, metavar="B,H,N,D", help="shape of v (default: that of k)")
    explain_parser.add_argument("--dtype", choices=FLOAT_NAMES, default="float16")
    explain_parser.add_argument("--causal", action="store_true")
    explain_parser.add_argument(
        "--window", type=_window, metavar="LEFT,RIGHT", help="keys left and right of a query; 'none' leaves a side open"
    )
    explain_parser.add_argument("--softcap", type=float)
    explain_parser.add_argument(
        "--device", type=int, metavar="CC", help="compute capability to plan for, such as 90 (default: this machine)"
    )
    explain_parser.add_argument("--source", action="store_true", help="also print the generated kernel source")
    commands.add_parser("bench", help="measure speed and error, beside other libraries", add_help=False)
    commands.add_parser("demo", help="classify handwritten digits by attention", add_help=False)
    if arguments[:1] == ["bench"]:
        from .bench.command import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["demo"]:
        from .demo import main as demo

        return demo(arguments[1:])
    parsed = parser.parse_args(arguments)
    if parsed.command == "doctor":
        return _doctor()
    if parsed.command == "kernels":
        return _kernels()
    return _explain(parsed)


if __name__ == "__main__":
    sys.exit(main())
