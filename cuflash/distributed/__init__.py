"""Attention over sequences that several processes hold in parts, one process to each GPU or each machine.

`attention` is called by all ranks of a communicator, each with its own queries, keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..gpu.copies import use_device
from ..gpu.nccl import NcclLink, communicator_of
from ..problem.arrays import FLOAT_NAMES, HOST, ArrayInfo, inspect
from ..problem.checks import clamp_offset, optional_array, parse_causal, parse_integer
from ..problem.describe import describe_attention
from ..problem.problem import Problem
from ..problem.signatures import Causal, FloatDtype, Precision, Real, Window
from ..states import finish, results_for
from .agree import Call, Link, agree
from .layout import LAYOUTS, Layout, parts_of, shard, unshard
from .ring import Task, walk

MAX_PARTS = 4096

__all__ = ["attention", "shard", "unshard"]


def __dir__() -> list[str]:
    return sorted(__all__)


def attention(
    q: Any,
    k: Any,
    v: Any,
    comm: Any,
    *,
    layout: Layout = "contiguous",
    num_parts: int = 1,
    timeout: float | None = 1800.0,
    causal: Causal = False,
    window: Window | None = None,
    query_offset: int | None = None,
    scale: Real | None = None,
    bias: Any = None,
    mask: Any = None,
    softcap: Real | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    precision: Precision | None = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    out_dtype: FloatDtype | None = None,
) -> Any:
    r"""Attention over the keys of all ranks, for the queries of this one.

    All ranks of the communicator call this at the same time, each with its part of a sequence. Keys and values travel
    from rank to rank while those at hand are attended to [1]_; results stay where the queries are.

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
    out, lse : array, optional
        Written in place and returned.

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
    it. Beside its arrays a rank needs memory for the keys and values of two ranks, and for its results in the type of
    the computation. Before keys travel, ranks tell each other their lengths, for which the host waits.

    References
    ----------
    .. [1] H. Liu, M. Zaharia, P. Abbeel, "Ring attention with blockwise transformers for near-infinite context", 2023,
       arXiv:2310.01889.

    Examples
    --------
    With one rank, whose communicator has itself alone; more are started by ``mpiexec -n 4 python script.py``:

    >>> import numpy as np, cuflash.distributed
    >>> from mpi4py import MPI
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 4, 100, 16))
    >>> comm = MPI.COMM_SELF
    >>> mine = [cuflash.distributed.shard(x, comm.rank, comm.size) for x in (q, k, v)]
    >>> out = cuflash.distributed.attention(*mine, comm, causal=True)
    >>> np.allclose(out, cuflash.attention(q, k, v, causal=True))
    True
    """
    link = _link(comm, timeout)
    pairs = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    call: Call | None = None
    error: Exception | None = None
    try:
        _check_layout(layout, num_parts, query_offset)
        problem, infos = describe_attention(
            q, k, v, causal=causal, window=window, query_offset=query_offset, scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, precision=precision, return_lse=return_lse, out=out, lse=lse,
            out_dtype=out_dtype,
        )  # fmt: skip
        _check_device(infos["q"].device, link)
        _check_pairs(problem, infos, pairs)
        common: dict[str, Any] = {"layout": layout, "num_parts": int(num_parts), "causal": str(causal)}
        common["query_offset"] = None if query_offset is None else clamp_offset(int(query_offset))
        common |= _common(problem, infos)
        columns = tuple(infos[name].shape[-1] for name in pairs)
        call = Call(problem.seqlen_q, problem.seqlen_k, columns, common)
    except Exception as raised:  # which the other ranks must hear of, whatever it is
        error = raised
    calls = agree(link, call, error)
    lengths_q, lengths_k = [x.seqlen_q for x in calls], [x.seqlen_k for x in calls]
    _, offset = parse_causal(causal, query_offset, sum(lengths_k) - sum(lengths_q))
    assert offset is not None, "it is no array"
    options = {"scale": problem.scale, "softcap": softcap, "precision": precision}
    if alibi_slopes is not None:
        options["alibi_slopes"] = infos["alibi_slopes"].array
    task = Task(
        q=_with_batch(infos["q"].array, problem),
        k=_contiguous_heads(infos["k"].array),
        v=_contiguous_heads(infos["v"].array),
        parts_q=parts_of(lengths_q, layout, num_parts),
        parts_k=parts_of(lengths_k, layout, num_parts),
        num_keys=sum(lengths_k),
        offset=offset,
        window=(problem.window_left, problem.window_right),
        pairs={name: infos[name].array for name in pairs},
        options=options,
        device=infos["q"].device,
        dtype=problem.traits.dtype,
    )
    with use_device(task.device):
        state = walk(task, link)
        new_out, new_lse = results_for(problem, task.device, out, lse)
        written = infos["out"].array if "out" in infos else new_out, infos["lse"].array if "lse" in infos else new_lse
        views = [x if x is None or not problem.is_2d else x[None] for x in written]
        finish(state, None if sinks is None else infos["sinks"].array, *views)
    return new_out if new_lse is None else (new_out, new_lse)


def _link(comm: Any, timeout: float | None) -> Link:
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
        raise ValueError(f"timeout is {timeout!r}, expected seconds above 0, or None")
    communicator = communicator_of(comm) if type(comm).__module__.startswith("cupy") else None
    if communicator is not None:
        return NcclLink(communicator, timeout)
    if hasattr(comm, "Iallgather"):
        from .mpi import MpiLink

        return MpiLink(comm, timeout)
    raise TypeError(
        f"comm is a {type(comm).__name__}, expected a communicator: of mpi4py, a cupy.cuda.nccl.NcclCommunicator or a "
        "cupyx.distributed.NCCLBackend"
    )


def _check_layout(layout: Any, num_parts: Any, query_offset: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected 'contiguous' or 'zigzag'")
    if not 1 <= parse_integer("num_parts", num_parts, f"an int from 1 to {MAX_PARTS}") <= MAX_PARTS:
        raise ValueError(f"num_parts is {num_parts}, expected an int from 1 to {MAX_PARTS}")
    if query_offset is not None:
        parse_integer("query_offset", query_offset, "an int, the same for all batches and ranks")


def _check_device(device: int, link: Link) -> None:
    if link.device is not None and device == HOST:
        raise TypeError("q is a NumPy array, expected a GPU array: comm is NCCL's; one of mpi4py takes both")
    if link.device is not None and device != link.device:
        raise ValueError(f"q is on GPU {device}, expected GPU {link.device}, which the communicator was made for")


def _check_pairs(problem: Problem, infos: dict[str, ArrayInfo], pairs: dict[str, Any]) -> None:
    """Check what has a row for each query, in all but its columns, and note it among the arrays."""
    shape = (*problem.batch, problem.num_heads_q, problem.seqlen_q, 1)
    for name, x in pairs.items():
        info = inspect(name, x)
        if not info.shape:
            raise ValueError(f"{name} has no axes, expected one for the keys of all ranks")
        column = info._replace(shape=(*info.shape[:-1], 1))
        optional_array(infos, name, column, ("bool",) if name == "mask" else FLOAT_NAMES, shape)
        infos[name] = info


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
        "kind of arrays": "NumPy" if infos["q"].device == HOST else "GPU",
    }


def _with_batch(q: Any, problem: Problem) -> Any:
    """Give queries all the leading axes of the call, repeated where they have them not."""
    shape = (*problem.batch, problem.num_heads_q, problem.seqlen_q, problem.traits.head_dim)
    return np.broadcast_to(q.reshape((1,) * (len(shape) - q.ndim) + q.shape), shape)


def _contiguous_heads(x: Any) -> Any:
    x = x[None] if x.ndim == 2 else x
    return x if x.flags.c_contiguous else x.copy(order="C")
