"""Command line: python -m cuflash doctor | kernels | explain | bench | demo."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NamedTuple

import numpy as np

from . import __version__
from .dense import attention
from .doctor import doctor
from .explain import explain
from .options import options
from .plan.gated import GATED_KERNELS
from .plan.table import KERNELS
from .problem.arrays import DTYPES, FLOAT_NAMES
from .problem.describe_gated import MAX_GATED_HEAD_DIM
from .varlen import attention_varlen


class _Array(NamedTuple):
    """A stand-in for an array; without a dtype or a shape until the rest of the call is known."""

    shape: tuple[int, ...] | None
    dtype: np.dtype | None


def _kernels() -> int:
    """List the tables of kernels."""
    for spec in KERNELS:
        print(f"{spec.name}: {spec.summary}")
        print(f"  operations  {', '.join(spec.operations)}")
        print(f"  dtypes      {', '.join(spec.dtypes)}")
        print(f"  head_dim    1 to {spec.max_head_dim}")
        print(f"  features    {', '.join(sorted(spec.features))}")
        only = ", ".join(str(capability / 10) for capability in spec.capabilities)
        print(f"  GPUs        compute capability {only or f'{spec.min_compute_capability / 10} and newer'}")
    for gated in GATED_KERNELS:
        print(f"{gated.name}: {gated.summary}")
        print(f"  operations  {', '.join(gated.operations)}")
        print(f"  dtypes      {', '.join(gated.dtypes)}")
        print(f"  head_dim    1 to {MAX_GATED_HEAD_DIM}")
        print(f"  GPUs        compute capability {gated.min_compute_capability / 10} and newer")
    print("cpu: NumPy arrays, every feature")
    return 0


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid shape {text!r}, expected lengths such as 1,16,4096,64") from None


def _array(text: str) -> _Array:
    shape, _, dtype = text.partition(":")
    if dtype and dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"invalid dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    return _Array(_shape(shape) if shape else None, DTYPES[dtype] if dtype else None)


def _query_offset(text: str) -> int | _Array:
    try:
        return _array(text) if ":" in text else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid offset {text!r}, expected an int, or SHAPE:DTYPE") from None


def _window(text: str) -> tuple[int | None, ...]:
    try:
        return tuple(None if part.strip() == "none" else int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid window {text!r}, expected LEFT,RIGHT: ints, or 'none'") from None


def _compute_capability(text: str) -> int:
    """Read it with the point that `kernels` prints, or without."""
    if not re.fullmatch(r"[0-9]+(\.[0-9])?", text):
        raise argparse.ArgumentTypeError(f"invalid compute capability {text!r}, expected one such as 90 or 9.0")
    return int(text.replace(".", ""))


def _completed(call: dict[str, Any]) -> dict[str, Any]:
    """Give stand-ins the shapes and dtypes that the command line leaves to q, k and v."""
    q, k, v = (call[name] for name in "qkv")
    num_heads_q = q.shape[-2 if "cu_seqlens_q" in call else -3] if len(q.shape) > 2 else 1
    scores = (*q.shape[-2:-1], *k.shape[-2:-1])
    out_dtype = DTYPES[call["out_dtype"]] if "out_dtype" in call else q.dtype
    integers, floats = DTYPES["int32"], DTYPES["float32"]
    usual = {
        "bias": _Array(scores, q.dtype),
        "mask": _Array(scores, DTYPES["bool"]),
        "alibi_slopes": _Array((num_heads_q,), floats),
        "sinks": _Array((num_heads_q,), floats),
        "query_offset": _Array((), integers),
        "cu_seqlens_q": _Array((2,), integers),
        "cu_seqlens_k": _Array((2,), integers),
        "out": _Array((*q.shape[:-1], v.shape[-1]), out_dtype),
        "lse": _Array(q.shape[:-1], q.dtype if q.dtype == np.float64 else floats),
        "workspace": _Array((0,), DTYPES["uint8"]),
    }
    given = {name: x for name, x in call.items() if name in usual and isinstance(x, _Array)}
    for name, (shape, dtype) in given.items():
        like = usual[name]
        call[name] = _Array(like.shape if shape is None else shape, like.dtype if dtype is None else dtype)
    return call


def _explain(arguments: dict[str, Any]) -> int:
    device, kernel, tile, source = (arguments.pop(name) for name in ("device", "kernel", "tile", "source"))
    dtype = DTYPES[arguments.pop("dtype")]
    call = {name: x for name, x in arguments.items() if x is not None}
    shapes = {"q": call.pop("q")}
    shapes["k"] = call.pop("k", shapes["q"])
    shapes["v"] = call.pop("v", shapes["k"])
    call = _completed({**{name: _Array(shape, dtype) for name, shape in shapes.items()}, **call})
    try:
        with options(kernel=kernel, tile=tile):
            explanation = explain(attention_varlen if "cu_seqlens_q" in call else attention, device=device, **call)
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(explanation)
    if source:
        print(explanation.source or "NumPy arrays need no kernel source; --device CC plans for a GPU")
    return 0


def _add_explain(parser: argparse.ArgumentParser) -> None:
    """Add what `explain` takes: every argument of `attention` and `attention_varlen` by its name."""
    add = parser.add_argument
    add("--q", type=_shape, required=True, metavar="B,H,N,D", help="shape of q")
    add("--k", type=_shape, metavar="B,H,N,D", help="shape of k (default: that of q)")
    add("--v", type=_shape, metavar="B,H,N,D", help="shape of v (default: that of k)")
    add("--dtype", choices=FLOAT_NAMES, default="float16", help="of q, k and v (default: float16)")
    aligned = "which keys are lined up with the queries (default: bottom_right, the last ones)"
    add("--causal", nargs="?", const=True, choices=("bottom_right", "top_left"), help=aligned)
    window = "keys left and right of a query; 'none' leaves a side open"
    add("--window", type=_window, metavar="LEFT,RIGHT", help=window)
    offset = "key position of query 0: an int, or an array, such as 4,1:int32"
    add("--query-offset", type=_query_offset, metavar="INT|SHAPE:DTYPE", help=offset)
    add("--scale", type=float, help="default: D ** -0.5")
    for name, usual in (("bias", "Nq,Nk"), ("mask", "Nq,Nk"), ("alibi-slopes", "Hq"), ("sinks", "Hq")):
        shape = f"its shape (default: {usual}), and its dtype if it is not the usual one"
        add(f"--{name}", type=_array, nargs="?", const=_Array(None, None), metavar="SHAPE[:DTYPE]", help=shape)
    add("--softcap", type=float)
    add("--precision", choices=("ieee", "tf32"))
    add("--return-lse", action="store_true", default=None)
    add("--out-dtype", choices=FLOAT_NAMES)
    for name in ("out", "lse"):
        add(
            f"--{name}",
            type=_array,
            nargs="?",
            const=_Array(None, None),
            metavar="SHAPE[:DTYPE]",
            help="given by the caller",
        )
    add("--workspace", type=_array, metavar="BYTES", help="given by the caller")
    packed = "packed sequences: its shape, B + 1; this makes it a call of attention_varlen"
    add("--cu-seqlens-q", type=_array, metavar="SHAPE[:DTYPE]", help=packed)
    add("--cu-seqlens-k", type=_array, metavar="SHAPE[:DTYPE]", help="likewise (default: that of the queries)")
    add("--max-seqlen-q", type=int, metavar="N")
    add("--max-seqlen-k", type=int, metavar="N")
    device = "compute capability to plan for, such as 90 or 9.0 (default: this machine)"
    add("--device", type=_compute_capability, metavar="CC", help=device)
    add("--kernel", help="insist on a kernel, as cuflash.options does")
    add("--tile", help="insist on a tile, such as 64x64")
    add("--source", action="store_true", help="also print the generated kernel source")


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m cuflash", description="Fused tiled attention for CuPy and NumPy arrays."
    )
    parser.add_argument("--version", action="version", version=f"cuflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="print the configuration and check every back end against float64")
    commands.add_parser("kernels", help="list the kernels")
    _add_explain(commands.add_parser("explain", help="say which kernel serves a call, and why"))
    commands.add_parser("bench", help="measure speed and error, beside other libraries", add_help=False)
    commands.add_parser("demo", help="classify handwritten digits by attention", add_help=False)
    if arguments[:1] == ["bench"]:
        from .bench.command import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["demo"]:
        from .demo.command import main as demo

        return demo(arguments[1:])
    parsed = vars(parser.parse_args(arguments))
    command = parsed.pop("command")
    if command == "doctor":
        return doctor()
    return _kernels() if command == "kernels" else _explain(parsed)


if __name__ == "__main__":
    sys.exit(main())
