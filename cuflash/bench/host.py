"""What a call costs on the host: arguments that it has seen, a length that it has not, a scale that it has not.

Everything is a call with arguments that no call had before, or with those of the one before: no cache is looked into.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..dense import attention
from ..varlen import attention_varlen
from .device import NumpyBackend, Times

LENGTHS = range(17, 217)
CACHED = range(2048, 2248)
"""Keys of a decoding step."""
WARM_EVERY = 32
"""Of the lengths, those that are called beforehand, so that kernels are compiled; they are not measured."""
REPEATS = 1000
HEAD_DIM = 64
MakeCall = Callable[[int], Callable[..., Any]]
"""Takes a length and returns a call, whose keyword arguments may be added to."""


def host_times(backend: NumpyBackend) -> dict[str, dict[str, Times]]:
    """Time until a call returns: by kind of call, then by what is new, "repeated", "new length" or "new scale"."""
    return {name: _times(backend, make_call, lengths) for name, (make_call, lengths) in _calls(backend).items()}


def repeated(backend: NumpyBackend, call: Callable[[], Any]) -> Times:
    """Time the same call again and again."""
    call()
    return _spread(backend, (call for _ in range(REPEATS)))


def new_head_dims(backend: NumpyBackend) -> Times:
    """Time the first call of a head_dim, by a kernel that earlier calls have compiled: a plan of its own."""
    xp = backend.xp
    dims = range(HEAD_DIM, HEAD_DIM - 16, -4)  # one kernel serves them all, in float32
    arrays = {dim: xp.ones((1, 1, LENGTHS[0], dim), np.float32) for dim in dims}
    first, *others = [partial(attention, arrays[d], arrays[d], arrays[dv]) for d, dv in product(dims, dims)]
    first()
    return _spread(backend, others)


def _times(backend: NumpyBackend, make_call: MakeCall, lengths: range) -> dict[str, Times]:
    for length in lengths[::WARM_EVERY]:
        make_call(length)()
    call = make_call(lengths[0])
    new = [make_call(length) for i, length in enumerate(lengths) if i % WARM_EVERY]
    return {
        "repeated": repeated(backend, call),
        "new length": _spread(backend, new),
        "new scale": _spread(backend, (partial(call, scale=0.1 + 1e-3 * i) for i in range(len(new)))),
    }


def _spread(backend: NumpyBackend, calls: Iterable[Callable[[], Any]]) -> Times:
    times = []
    for i, call in enumerate(calls):
        if i % 100 == 0:  # a host that is too far ahead of its GPU has to wait
            backend.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return min(times), statistics.median(times)


def _calls(backend: NumpyBackend) -> Mapping[str, tuple[MakeCall, range]]:
    """Kinds of calls on arrays so small that a GPU is not what they wait for, each with its lengths."""
    xp = backend.xp
    dtype = np.dtype(np.float32 if backend.name == "numpy" else np.float16)
    longest = LENGTHS.stop
    x, out = (xp.ones((1, 1, longest, HEAD_DIM), dtype) for _ in range(2))
    cache = xp.ones((1, 1, CACHED.stop, HEAD_DIM), dtype)
    packed = xp.ones((longest, 1, HEAD_DIM), dtype)
    bias, mask = xp.zeros((longest, longest), dtype), xp.ones((longest, longest), bool)
    heads = xp.ones(1, np.float32)

    def dense(n: int, **options: Any) -> Callable[..., Any]:
        return partial(attention, *(x[..., :n, :],) * 3, **options)

    def varlen(n: int) -> Callable[..., Any]:
        return partial(attention_varlen, *(packed[:n],) * 3, xp.asarray([0, n // 3, n], np.int32))

    def decode(n: int) -> Callable[..., Any]:
        return partial(attention, x[..., :1, :], *(cache[..., :n, :],) * 2, causal=True, sinks=heads)

    return {
        "plain": (dense, LENGTHS),
        "out": (lambda n: dense(n, out=out[..., :n, :]), LENGTHS),
        "bias": (lambda n: dense(n, bias=bias[:n, :n]), LENGTHS),
        "mask": (lambda n: dense(n, mask=mask[:n, :n]), LENGTHS),
        "sinks": (lambda n: dense(n, sinks=heads), LENGTHS),
        "ALiBi": (lambda n: dense(n, alibi_slopes=heads), LENGTHS),
        "varlen": (varlen, LENGTHS),
        "decoding with sinks": (decode, CACHED),
    }
