"""`attention` of ranks: the public function, and what it checks before it walks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np

from ..cpu.execute import check_settings
from ..gpu.copies import use_device
from ..gpu.nccl import NcclLink, communicator_of
from ..problem.arrays import FLOAT_NAMES, HOST, ArrayInfo, brief, inspect
from ..problem.checks import check_apart, clamp_offset, optional_array, parse_causal, parse_integer
from ..problem.describe import describe_attention
from ..problem.hints import check_options
from ..problem.problem import HEAD_ARRAYS, Problem
from ..problem.signatures import Causal, FloatDtype, Precision, Window
from ..problem.signatures import Real as RealLike
from ..settings import settings
from ..states import finish, results_for
from .agree import Call, Link, agree, record_of
from .layout import Layout, check_layout, parts_of
from .ring import Task, contiguous, head_groups, of_heads, walk

MAX_PARTS = 4096
TIMEOUT = 1800.0
"""Seconds."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    comm: Any,
    *,
    layout: Layout = "contiguous",
    num_parts: int = 1,
    timeout: float | None = TIMEOUT,
    causal: Causal = False,
    window: Window | None = None,
    query_offset: int | None = None,
    scale: RealLike | None = None,
    bias: Any = None,
    mask: Any = None,
    softcap: RealLike | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: Precision | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: FloatDtype | None = None,
    **unknown: Any,
) -> Any:
    r"""Attention over the keys of all ranks, for the queries of this one.

    All ranks of the communicator call this at the same time, each with its part of a sequence. Keys and values travel
    from rank to rank while those at hand are attended to [1]_; results stay where the queries are.

    .. warning::
       Each rank passes its own rows alone. If all pass a whole array, that is a valid call too: of a sequence that has
       it as many times as there are ranks. No error can tell, nor if rows were divided by another `layout`, or other
       axes taken for heads and sequence.

    Parameters
    ----------
    q : array, shape (..., Hq, Nq, D)
        This rank's queries, as for `cuflash.attention`: NumPy, or CuPy on this rank's GPU. `Nq` may differ from rank
        to rank, and be 0.
    k : array, shape (..., Hkv, Nk, D)
        This rank's keys; `Nk` may differ from rank to rank, and be 0.
    v : array, shape (..., Hkv, Nk, Dv)
        This rank's values.
    comm : communicator
        Of mpi4py; for CuPy arrays rather a `cupy.cuda.nccl.NcclCommunicator` or a `cupyx.distributed.NCCLBackend`: by
        MPI they go through the host's memory.
    layout : {"contiguous", "zigzag"}, optional
        How the whole sequence of queries, and that of keys, is divided. "contiguous": the rows of rank 0, of rank 1 and
        so on. "zigzag": the first halves of all ranks' rows, in their order, then the second halves, in reverse order;
        with `causal` all ranks have equally much to do then. `shard` divides arrays so.
    num_parts : int, optional
        As if this rank were so many ranks, each with an equal part of the rows. The bits of a result depend on where
        parts begin and end, and on the layout, not on how many ranks hold them: 2 ranks with 2 parts each find what 4
        ranks find.
    timeout : float or None, optional
        Seconds to wait for other ranks; None: for ever.
    causal, window, scale, softcap, precision, return_lse, out_dtype : optional
        As for `cuflash.attention`. Positions are those in the whole sequence.
    query_offset : int, optional
        Key position of the first query of all ranks. Default: the last query stands at the last key.
    bias, mask : array that broadcasts to (..., Hq, Nq, number of all keys), optional
        Rows for this rank's queries, columns for the keys of all ranks in the order of the whole sequence.
    alibi_slopes, sinks : array that broadcasts to (..., Hq), optional
        As for `cuflash.attention`, the same on all ranks.
    out, lse : array (..., Hq, Nq, Dv) and (..., Hq, Nq), optional
        Written in place and returned; apart from all inputs in memory. lse is float32, float64 for float64.

    Returns
    -------
    out : array, shape (..., Hq, Nq, Dv)
        For this rank's queries.
    lse : array, shape (..., Hq, Nq)
        Only with `return_lse` or `lse`.

    Raises
    ------
    TypeError, ValueError
        As for `cuflash.attention`; also where ranks differ in dtype, heads, features or options. If one rank raises
        before keys travel, all do.
    RuntimeError
        Another rank has raised an error while keys travelled, or an earlier call with this communicator has ended so:
        make another one.
    TimeoutError
        Another rank has not come, or not sent its keys, within `timeout`.

    See Also
    --------
    shard : The part of a whole sequence that a rank holds.
    cuflash.merge_attention_states : The same by hand.

    Notes
    -----
    Each part of queries meets the parts of keys in a fixed order: its own, then each from the one before. Partial
    results carry the largest logit and the sum of exponentials apart. Keys that no query of a rank sees are not sent to
    it. Beside its arrays a rank needs memory for the keys and values of two ranks, for what it sends of keys that are
    not contiguous, and for its results in the type of the computation, on the host in float64. Before keys travel,
    ranks tell each other their lengths, for which the host waits, as it does for the keys of other ranks.

    References
    ----------
    .. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023,
       arXiv:2310.01889.

    Examples
    --------
    With one rank, whose communicator has itself alone; ``mpiexec -n 4 python -m mpi4py script.py`` starts more:

    >>> import numpy as np, cuflash.distributed
    >>> from mpi4py import MPI
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 100, 16))
    >>> comm = MPI.COMM_SELF
    >>> mine = [cuflash.distributed.shard(x, comm.rank, comm.size) for x in (q, k, v)]
    >>> out = cuflash.distributed.attention(*mine, comm, causal=True)
    >>> np.allclose(out, cuflash.attention(q, k, v, causal=True))
    True
    """
    link: Link | None = None
    error: BaseException | None = None
    call: Call | None = None
    try:
        link, error = _link(comm, timeout)
        if error is None:
            _check_unknown(unknown)
            offset = _check_own_options(layout, num_parts, query_offset)
            problem, infos = describe_attention(
                q, k, v, causal=causal, window=window, query_offset=offset, scale=scale, softcap=softcap,
                alibi_slopes=alibi_slopes, sinks=sinks, precision=precision, return_lse=return_lse, out=out, lse=lse,
                out_dtype=out_dtype,
            )  # fmt: skip
            _check_device(infos["q"].device, link)
            if infos["q"].device == HOST:
                check_settings(settings())
            pairs = _check_pairs(problem, infos, bias=bias, mask=mask)
            common = {"layout": layout, "num_parts": int(num_parts), "causal": str(causal), "query_offset": offset}
            columns = {name: info.shape[-1] for name, info in pairs.items()}
            call = Call(problem.seqlen_q, problem.seqlen_k, columns, common | _common(problem, infos))
    except BaseException as raised:  # which the other ranks must hear of, whatever it is
        if link is None and isinstance(raised, Exception):
            raise  # there is no way to them
        error = raised
    if link is None:
        try:
            link, _ = _link(comm, timeout)
        except Exception as failed:
            assert error is not None, "it was interrupted"
            raise error from failed
    with _aborted_by_errors(link) as known_to_all:
        records = link.gather(record_of(call, error))
        try:
            calls = agree(records, error)
        except BaseException as raised:
            if raised is error or isinstance(raised, Exception):
                known_to_all.append(raised)
            raise
    with _aborted_by_errors(link), use_device(infos["q"].device):
        task = _task(problem, infos, calls, causal, offset)
        new_out, new_lse = results_for(problem, task.device, out, lse)
        written = infos["out"].array if "out" in infos else new_out, infos["lse"].array if "lse" in infos else new_lse
        out_of_all, lse_of_all = (x if x is None or not problem.is_2d else x[None] for x in written)
        sinks_of_all = infos["sinks"].array if "sinks" in infos else None
        for heads, part in head_groups(task):
            results = of_heads(out_of_all, -3, heads), of_heads(lse_of_all, -2, heads)
            finish(walk(part, link), of_heads(sinks_of_all, -1, heads), *results)
    return new_out if new_lse is None else (new_out, new_lse)


@contextmanager
def _aborted_by_errors(link: Link) -> Iterator[list[BaseException]]:
    """Let other ranks know if this one ends in the middle, but for errors that are said to be known to them."""
    known: list[BaseException] = []
    try:
        yield known
    except BaseException as error:
        if not any(error is one for one in known):
            link.abort(error)
        raise


def _task(problem: Problem, infos: dict[str, ArrayInfo], calls: list[Call], causal: Causal, offset: int | None) -> Task:
    """What this rank has to do, given the calls of all."""
    lengths_q, lengths_k = [x.seqlen_q for x in calls], [x.seqlen_k for x in calls]
    layout, num_parts = calls[0].common["layout"], calls[0].common["num_parts"]
    _, first = parse_causal(causal, offset, sum(lengths_k) - sum(lengths_q))
    assert first is not None, "it is no array"
    traits = problem.traits
    options = {"scale": problem.scale, "softcap": traits.softcap or None, "precision": traits.precision}
    if "alibi_slopes" in infos:
        options["alibi_slopes"] = infos["alibi_slopes"].array
    pairs: dict[str, Any] = {name: infos[name].array for name in ("bias", "mask") if name in infos}
    return Task(
        q=_with_batch(infos["q"].array, problem),
        k=_contiguous_heads(infos["k"].array),
        v=_contiguous_heads(infos["v"].array),
        parts_q=parts_of(lengths_q, layout, num_parts),
        parts_k=parts_of(lengths_k, layout, num_parts),
        num_keys=sum(lengths_k),
        offset=first,
        window=(problem.window_left, problem.window_right),
        pairs=pairs,
        options=options,
        by_order=problem.window_left is None and not pairs and "alibi_slopes" not in infos,
        device=infos["q"].device,
        dtype=traits.dtype,
    )


def _link(comm: Any, timeout: Any) -> tuple[Link, Exception | None]:
    """Return how ranks are connected, and what is wrong with the timeout, which the others must hear of."""
    error: Exception | None = None
    seconds: float | None = TIMEOUT
    if timeout is None:
        seconds = None
    elif isinstance(timeout, bool) or not isinstance(timeout, Real):
        error = TypeError(f"timeout is a {type(timeout).__name__}, expected seconds, or None")
    elif not timeout > 0:  # type: ignore[operator]
        error = ValueError(f"timeout is {brief(timeout)}, expected seconds above 0, or None")
    else:
        try:
            seconds = float(timeout)
        except OverflowError:
            seconds = None
    libraries = {kind.__module__.partition(".")[0] for kind in type(comm).__mro__}
    communicator = communicator_of(comm) if libraries & {"cupy", "cupyx", "cupy_backends"} else None
    if communicator is not None:
        return NcclLink(communicator, seconds), error
    if "mpi4py" in libraries:
        from .mpi import MpiLink

        return MpiLink(comm, seconds), error
    raise TypeError(
        f"comm is a {type(comm).__name__}, expected a communicator: of mpi4py, a cupy.cuda.nccl.NcclCommunicator or a "
        "cupyx.distributed.NCCLBackend"
    )


def _check_unknown(names: dict[str, Any]) -> None:
    check_options("attention", names, namesake=attention)
    for name in names:
        raise TypeError(f"attention() of several processes takes no {name}; cuflash.attention does")


def _check_own_options(layout: Any, num_parts: Any, query_offset: Any) -> int | None:
    """Check what `cuflash.attention` has not, or not so; return the query offset."""
    check_layout(layout)
    if not 1 <= parse_integer("num_parts", num_parts, f"an int from 1 to {MAX_PARTS}") <= MAX_PARTS:
        raise ValueError(f"num_parts is {num_parts}, expected an int from 1 to {MAX_PARTS}")
    if query_offset is None:
        return None
    return clamp_offset(parse_integer("query_offset", query_offset, "an int, the same for all batches and ranks"))


def _check_device(device: int, link: Link) -> None:
    if link.device is not None and device == HOST:
        raise TypeError("q is a NumPy array, expected a GPU array: comm is NCCL's; one of mpi4py takes both")
    if link.device is not None and device != link.device:
        raise ValueError(f"q is on GPU {device}, expected GPU {link.device}, which the communicator was made for")


def _check_pairs(problem: Problem, infos: dict[str, ArrayInfo], **given: Any) -> dict[str, ArrayInfo]:
    """Check bias and mask in all but their columns, note them among the arrays, and return them."""
    shape = (*problem.batch, problem.num_heads_q, problem.seqlen_q)
    pairs = {name: inspect(name, x) for name, x in given.items() if x is not None}
    for name, info in pairs.items():
        if not info.shape:
            raise ValueError(f"{name} has no axes, expected one for the keys of all ranks")
        rows = info.shape[:-1]
        if len(rows) > len(shape) or any(x not in (1, y) for x, y in zip(rows[::-1], shape[::-1], strict=False)):
            raise ValueError(
                f"{name} has shape {info.shape}, expected one that broadcasts to {shape} and the keys of all ranks"
            )
        column = info._replace(shape=(*rows, 1))
        optional_array(infos, name, column, ("bool",) if name == "mask" else FLOAT_NAMES, (*shape, 1))
        infos[name] = info
    for name in ("out", "lse"):
        if name in infos:
            check_apart(name, infos[name], list(pairs.items()))
    return pairs


def _common(problem: Problem, infos: dict[str, ArrayInfo]) -> dict[str, Any]:
    """What has to be the same on all ranks."""
    traits = problem.traits
    return {
        "dtype": traits.dtype,
        "head_dim": traits.head_dim,
        "head_dim_v": traits.head_dim_v,
        "number of heads": [problem.num_heads_q, problem.num_heads_kv],
        "batch": list(problem.batch),
        "leading axes of k": list(infos["k"].shape[:-2]),
        "leading axes of v": list(infos["v"].shape[:-2]),
        "window": [problem.window_left, problem.window_right],
        "scale": problem.scale,
        "softcap": traits.softcap,
        "precision": traits.precision,
        **{f"whether there are {name}": getattr(traits, name) for name in HEAD_ARRAYS},
        "kind of arrays": "NumPy" if infos["q"].device == HOST else "GPU",
    }


def _with_batch(q: Any, problem: Problem) -> Any:
    """Give queries all the leading axes of the call, repeated where they have them not."""
    shape = (*problem.batch, problem.num_heads_q, problem.seqlen_q, problem.traits.head_dim)
    if q.shape == shape:
        return q
    return np.broadcast_to(q.reshape((1,) * (len(shape) - q.ndim) + q.shape), shape)


def _contiguous_heads(x: Any) -> Any:
    return contiguous(x[None] if x.ndim == 2 else x)
