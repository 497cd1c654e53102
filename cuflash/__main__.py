"""Command line: python -m cuflash doctor | kernels | explain | bench | demo."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from . import __version__
from .dense import attention_lse
from .doctor import doctor
from .explain import FUNCTIONS, explain
from .gpu.compile import KernelCompileError
from .kv_cache import attention_with_kv_cache
from .options import options
from .plan.gated import GATED_KERNELS, GatedSpec
from .plan.table import KERNELS, KernelSpec
from .problem.arrays import DTYPES, FLOAT_NAMES
from .problem.describe_gated import MAX_GATED_HEAD_DIM


class _Array(NamedTuple):
    """A stand-in for an array; without a dtype or a shape until the rest of the call is known."""

    shape: Any
    """A tuple of ints, or None."""
    dtype: np.dtype | None


_NOT_GIVEN = _Array(None, None)


def _kernels() -> int:
    """List the tables of kernels."""
    for spec in KERNELS:
        _print_row(spec, spec.features)
    for gated in GATED_KERNELS:
        _print_row(gated, ())
    print("cpu: NumPy arrays, every feature")
    return 0


def _print_row(spec: KernelSpec | GatedSpec, features: Iterable[str]) -> None:
    of_v = isinstance(spec, GatedSpec) and spec.max_head_dim < MAX_GATED_HEAD_DIM
    print(f"{spec.name}: {spec.summary}")
    print(f"  operations  {', '.join(spec.operations)}")
    print(f"  dtypes      {', '.join(spec.dtypes)}")
    print(f"  head_dim    1 to {spec.max_head_dim}" + (f", of v 1 to {MAX_GATED_HEAD_DIM}" if of_v else ""))
    if features:
        print(f"  features    {', '.join(sorted(features))}")
    only = ", ".join(str(capability / 10) for capability in spec.capabilities)
    print(f"  GPUs        compute capability {only or f'{spec.min_compute_capability / 10} and newer'}")


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.split(","))
        if min(shape) < 0:
            raise ValueError
        return shape
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid shape {text!r}, expected lengths such as 1,16,4096,64") from None


def _array(text: str) -> _Array:
    shape, _, dtype = text.partition(":")
    if dtype and dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"invalid dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    return _Array(_shape(shape) if shape else None, DTYPES[dtype] if dtype else None)


def _array_of_shape(text: str) -> _Array:
    return _Array(_shape(text), None)


_ARRAY: dict[str, Any] = {"type": _array, "nargs": "?", "const": _NOT_GIVEN, "metavar": "SHAPE[:DTYPE]"}
"""How an option is read that may have the usual shape and dtype."""


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


def _like_attention(call: dict[str, Any], q: _Array, k: _Array, v: _Array) -> dict[str, _Array]:
    """Stand-ins of the shapes and dtypes that arrays of attention usually have, by argument name; v are values."""
    num_heads_q = q.shape[-2 if "cu_seqlens_q" in call else -3] if len(q.shape) > 2 else 1
    out_dtype = DTYPES[call["out_dtype"]] if "out_dtype" in call else q.dtype
    integers, floats = DTYPES["int32"], DTYPES["float32"]
    lse = _Array(q.shape[:-1], q.dtype if q.dtype == np.float64 else floats)
    return {
        "bias": _Array((*q.shape[-2:-1], *k.shape[-2:-1]), q.dtype),
        "mask": _Array((*q.shape[-2:-1], *k.shape[-2:-1]), DTYPES["bool"]),
        "alibi_slopes": _Array((num_heads_q,), floats),
        "sinks": _Array((num_heads_q,), floats),
        "query_offset": _Array((), integers),
        "cu_seqlens_q": _Array((2,), integers),
        "cu_seqlens_k": _Array((2,), integers),
        "out": _Array((*q.shape[:-1], v.shape[-1]), out_dtype),
        "lse": lse,
        "workspace": _Array((0,), DTYPES["uint8"]),
    }


def _like_cached(call: dict[str, Any], q: _Array, k: _Array, v: _Array) -> dict[str, _Array]:
    """The same of a call with a cache, whose new keys are as many as the queries."""
    batch, seqlen_q = (q.shape[0], q.shape[2]) if len(q.shape) == 4 else (1, 1)
    heads = k.shape[1:2]
    integers = DTYPES["int32"]
    return _like_attention(call, q, k, v) | {
        "k_new": _Array((batch, *heads, seqlen_q, *k.shape[-1:]), q.dtype),
        "v_new": _Array((batch, *heads, seqlen_q, *v.shape[-1:]), q.dtype),
        "seqlens_k": _Array((batch,), integers),
        "page_table": _Array((batch, 1), integers),
    }


def _like_gated(call: dict[str, Any], q: _Array, k: _Array, v: _Array) -> dict[str, _Array]:
    """The same of the gated delta rule, with as many chunks as there may be."""
    wide = q.dtype if q.dtype == np.float64 else DTYPES["float32"]
    boundaries = call["cu_seqlens"].shape or (2,) if "cu_seqlens" in call else None
    num_sequences = boundaries[0] - 1 if boundaries else q.shape[0]
    state = (*v.shape[-2:-1], *k.shape[-1:], *v.shape[-1:])
    num_chunks = q.shape[0] // max(call.get("chunk_size", 64), 1) + num_sequences
    return {
        **dict.fromkeys(("log_g", "log_g_cumsum", "beta"), _Array(v.shape[:-1], wide)),
        **dict.fromkeys(("state", "initial_state"), _Array((num_sequences, *state), wide)),
        "h": _Array((num_chunks, *state), q.dtype),
        "cu_seqlens": _Array((2,), DTYPES["int32"]),
        "out": v,
    }


def _completed(function: Callable[..., Any], call: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Add the arrays that the function needs, and give all the shapes and dtypes that the command line leaves out."""
    parameters = inspect.signature(function).parameters.values()
    call = {parameter.name: _NOT_GIVEN for parameter in parameters if parameter.default is parameter.empty} | call
    before: _Array = call["q"]
    cached = function is attention_with_kv_cache
    if cached and call["k_cache"] is _NOT_GIVEN:
        raise ValueError("attention_with_kv_cache takes --k-cache B,H,N,D, the shape of the cache, or that of pages")
    for name in ("q", "k_cache", "v_cache") if cached else ("q", "k", "v", "v_new"):
        if name in call:
            shape = call[name].shape
            before = call[name] = _Array(before.shape if shape is None else shape, dtype)
    like = _like_gated if "gated" in function.__name__ else _like_cached if cached else _like_attention
    usual = like(call, call["q"], call["k_cache" if cached else "k"], before)
    if function is attention_lse:
        usual["out"] = usual["lse"]
    given = {name: x for name, x in call.items() if name in usual and isinstance(x, _Array)}
    for name, (shape, own_dtype) in given.items():
        default = usual[name]
        call[name] = _Array(
            default.shape if shape is None else shape, default.dtype if own_dtype is None else own_dtype
        )
    return call


def _explain(arguments: dict[str, Any]) -> int:
    device, kernel, tile, source = (arguments.pop(name) for name in ("device", "kernel", "tile", "source"))
    name, dtype = arguments.pop("function"), DTYPES[arguments.pop("dtype")]
    call = {name: x for name, x in arguments.items() if x is not None}
    function = FUNCTIONS[name or ("attention_varlen" if "cu_seqlens_q" in call else "attention")]
    try:
        with options(kernel=kernel, tile=tile):
            explanation = explain(function, device=device, **_completed(function, call, dtype))
    except (TypeError, ValueError, KernelCompileError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(explanation)
    if source:
        print(explanation.source or "NumPy arrays need no kernel source; --device CC plans for a GPU")
    return 0


def _add_explain(parser: argparse.ArgumentParser) -> None:
    """Add what `explain` takes: every argument of every function by its name."""
    add = parser.add_argument
    usual = "default: attention, or attention_varlen with --cu-seqlens-q"
    add("function", nargs="?", choices=FUNCTIONS, metavar="FUNCTION", help=f"{', '.join(FUNCTIONS)}; {usual}")
    add("--q", type=_array_of_shape, required=True, metavar="B,H,N,D", help="shape of q, as the function has it")
    add("--k", type=_array_of_shape, metavar="B,H,N,D", help="shape of k (default: that of q)")
    add("--v", type=_array_of_shape, metavar="B,H,N,D", help="shape of v (default: that of k)")
    add("--dtype", choices=FLOAT_NAMES, default="float16", help="of q, k and v (default: float16)")
    add("--scale", type=float, help="default: D ** -0.5")
    add("--out", **_ARRAY, help="given by the caller")
    _add_attention(parser.add_argument_group("attention").add_argument)
    _add_cached(parser.add_argument_group("attention_with_kv_cache").add_argument)
    _add_gated(parser.add_argument_group("the gated delta rule").add_argument)
    device = "compute capability to plan for, such as 90 or 9.0 (default: this machine)"
    add("--device", type=_compute_capability, metavar="CC", help=device)
    add("--kernel", help="insist on a kernel, as cuflash.options does")
    add("--tile", help="insist on a tile, such as 64x64")
    add("--source", action="store_true", help="also print the generated kernel source")


def _add_attention(add: Callable[..., Any]) -> None:
    aligned = "which keys are lined up with the queries (default: bottom_right, the last ones)"
    add("--causal", nargs="?", const=True, choices=("bottom_right", "top_left"), help=aligned)
    window = "keys left and right of a query; 'none' leaves a side open"
    add("--window", type=_window, metavar="LEFT,RIGHT", help=window)
    offset = "key position of query 0: an int, or an array, such as 4,1:int32"
    add("--query-offset", type=_query_offset, metavar="INT|SHAPE:DTYPE", help=offset)
    for name, usual in (("bias", "Nq,Nk"), ("mask", "Nq,Nk"), ("alibi-slopes", "Hq"), ("sinks", "Hq")):
        add(f"--{name}", **_ARRAY, help=f"its shape (default: {usual}), and its dtype if it is not the usual one")
    add("--softcap", type=float)
    add("--precision", choices=("ieee", "tf32"))
    add("--return-lse", action="store_true", default=None)
    add("--out-dtype", choices=FLOAT_NAMES)
    add("--lse", **_ARRAY, help="given by the caller")
    add("--workspace", type=_array, metavar="BYTES", help="given by the caller")
    add("--cu-seqlens-q", type=_array, metavar="SHAPE[:DTYPE]", help="packed sequences: its shape, B + 1")
    add("--cu-seqlens-k", type=_array, metavar="SHAPE[:DTYPE]", help="likewise (default: that of the queries)")
    add("--max-seqlen-q", type=int, metavar="N")
    add("--max-seqlen-k", type=int, metavar="N")


def _add_cached(add: Callable[..., Any]) -> None:
    add("--k-cache", type=_array_of_shape, metavar="B,H,N,D", help="its shape, or that of pages")
    add("--v-cache", type=_array_of_shape, metavar="B,H,N,D", help="likewise (default: that of k_cache)")
    lengths = "keys in the cache: an int, or an array (default: one of B int32)"
    add("--seqlens-k", type=_query_offset, metavar="INT|SHAPE:DTYPE", help=lengths)
    for name in ("k-new", "v-new"):
        add(f"--{name}", **_ARRAY, help=f"its shape (default: as many keys as queries{_OR_OUTPUT[name]}")
    add("--page-table", type=_array, metavar="B,P[:DTYPE]", help="its shape")
    add("--num-splits", type=int, metavar="N")
    add("--split-size", type=int, metavar="KEYS")


_OR_OUTPUT = {"k-new": ")", "v-new": "; of chunk_gated_output: that of k)"}


def _add_gated(add: Callable[..., Any]) -> None:
    for name in ("log-g", "beta", "log-g-cumsum"):
        add(f"--{name}", **_ARRAY, help="default: the shape of v without features, float32")
    for name in ("state", "initial-state"):
        add(f"--{name}", **_ARRAY, help="default: N,Hv,K,V and float32")
    add("--h", **_ARRAY, help="default: as many chunks as there may be,Hv,K,V and the dtype of q")
    add("--cu-seqlens", type=_array, metavar="SHAPE[:DTYPE]", help="packed sequences: its shape, N + 1")
    add("--output-final-state", action="store_true", default=None)
    add("--chunk-size", type=int, metavar="N")


def _readable(arguments: list[str]) -> list[str]:
    """Write what argparse would misread in another way.

    `--window -1,0` as `--window=-1,0`, as the value is no option; the function in front of all options, as it is no
    value of one (`--causal attention`).
    """
    joined: list[str] = []
    for argument in arguments:
        if joined and re.fullmatch("--[a-z-]+", joined[-1]) and re.match("-[0-9]", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined[:1] + sorted(joined[1:], key=lambda argument: argument not in FUNCTIONS)


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
    usage = "python -m cuflash explain [function] [options]; --help lists them"
    _add_explain(commands.add_parser("explain", help="say which kernel serves a call, and why", usage=usage))
    commands.add_parser("bench", help="measure speed and error, beside other libraries", add_help=False)
    commands.add_parser("demo", help="classify handwritten digits by attention", add_help=False)
    if arguments[:1] == ["bench"]:
        from .bench.command import main as bench

        return bench(arguments[1:])
    if arguments[:1] == ["demo"]:
        from .demo.command import main as demo

        return demo(arguments[1:])
    parsed = vars(parser.parse_args(_readable(arguments)))
    command = parsed.pop("command")
    if command == "doctor":
        return doctor()
    return _kernels() if command == "kernels" else _explain(parsed)


if __name__ == "__main__":
    try:
        status: int | str = main()
        print(end="", flush=True)
    except OSError as error:  # the reader of a pipe, such as `head`, has seen enough; or a disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1 if isinstance(error, BrokenPipeError) else f"python -m cuflash: {error}"
    sys.exit(status)
