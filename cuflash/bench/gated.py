"""Problems of the gated delta rule that `python -m cuflash bench` measures."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from ..gated import chunk_gated_delta_rule, chunk_gated_output, recurrent_gated_delta_rule
from ..plan.gated import GATED_KERNELS
from ..problem.arrays import DTYPES, computed_dtype
from .inputs import Array, compulsory_bytes, drawn_dtype

OUTPUT, CHUNKS, RECURRENT = "chunk_gated_output", "chunk_gated_delta_rule", "recurrent_gated_delta_rule"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    OUTPUT: chunk_gated_output,
    CHUNKS: chunk_gated_delta_rule,
    RECURRENT: recurrent_gated_delta_rule,
}
MEAN_GATE = -0.1
"""Of the logarithms of decays: a state forgets half within seven tokens."""


class GatedCase(NamedTuple):
    """One problem of the gated delta rule: arrays in C order, sequences from state 0 but in `RECURRENT`."""

    group: str
    op: str
    """A key of `FUNCTIONS`."""
    dtype: str
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    heads: int
    """Of q and k."""
    heads_v: int
    head_dim: int = 128
    head_dim_v: int = 128
    packed: bool = False
    """Sequences lie one behind the other, as those of `OUTPUT` always do; otherwise they have the same length."""
    chunk_size: int = 64

    @property
    def name(self) -> str:
        """Everything that tells this case from others, in a line."""
        heads = f"{self.heads}" if self.heads == self.heads_v else f"{self.heads}/{self.heads_v}"
        feature = f"{self.head_dim}" if self.head_dim == self.head_dim_v else f"{self.head_dim}/{self.head_dim_v}"
        shortest, longest = min(self.lengths), max(self.lengths)
        tokens = f"{longest}" if shortest == longest else f"{shortest}..{longest}"
        chunks = "" if self.op == RECURRENT or self.chunk_size == 64 else f" chunks of {self.chunk_size}"
        batch = f"{'packed ' if self.packed and len(self.lengths) > 1 else 'B'}{len(self.lengths)}"
        return f"{self.dtype} {self.op} {batch} T{tokens} H{heads} D{feature}{chunks}"

    @property
    def boundaries(self) -> list[int]:
        """First token of each sequence, all of them counted one behind the other, and the number of tokens."""
        return [0, *accumulate(self.lengths)]

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First token of each chunk, and the one behind its last."""
        return [
            (first, min(first + self.chunk_size, end))
            for begin, end in pairwise(self.boundaries)
            for first in range(begin, end, self.chunk_size)
        ]

    @property
    def _rows(self) -> tuple[int, ...]:
        """Axes of arrays with a row for each token."""
        if self.op == OUTPUT:
            return (self.queries,)
        return (1, self.queries) if self.packed else (len(self.lengths), self.lengths[0])

    @property
    def _state(self) -> Array:
        shape = len(self.lengths), self.heads_v, self.head_dim, self.head_dim_v
        return Array(shape, computed_dtype(self.dtype))

    @property
    def inputs(self) -> dict[str, Array]:
        """Arrays by argument name."""
        keys = Array((*self._rows, self.heads, self.head_dim), self.dtype)
        values = Array((*self._rows, self.heads_v, self.head_dim_v), self.dtype)
        gates = Array((*self._rows, self.heads_v), self._state.dtype)
        boundaries = {"cu_seqlens": Array((len(self.lengths) + 1,), "int32")}
        if self.op == OUTPUT:
            states = Array((len(self.chunks), *self._state.shape[1:]), self.dtype)
            return {"q": keys, "k": keys, "v_new": values, "h": states, "log_g_cumsum": gates} | boundaries
        tokens = {"q": keys, "k": keys, "v": values, "log_g": gates, "beta": gates}
        if self.op == RECURRENT:
            return tokens | {"state": self._state}
        return tokens | boundaries if self.packed else tokens

    @property
    def results(self) -> dict[str, Array]:
        """Arrays that the call writes, by argument name; those that are inputs, too, are updated in place."""
        results = {"out": Array((*self._rows, self.heads_v, self.head_dim_v), self.dtype)}
        return results | {"state": self._state} if self.op == RECURRENT else results

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        return FUNCTIONS[self.op]

    @property
    def kernels(self) -> list[str]:
        """Rows of the table for the operation."""
        return [spec.name for spec in GATED_KERNELS if self.op in spec.operations]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the function that are not arrays."""
        return {} if self.op == RECURRENT else {"chunk_size": self.chunk_size}

    @property
    def flops(self) -> int:
        """Multiplications and additions of the products that the definition has.

        Those of a token with a state: k S, k u and q S of the rule, q S alone of the output, which also has q k and
        their weights times v for the pairs of each chunk.
        """
        state = self.head_dim * self.head_dim_v * self.heads_v
        if self.op != OUTPUT:
            return 2 * 3 * state * self.queries
        pairs = sum((end - first) * (end - first + 1) // 2 for first, end in self.chunks)
        of_pair = self.heads * self.head_dim + self.heads_v * self.head_dim_v
        return 2 * (state * self.queries + pairs * of_pair)

    @property
    def bytes(self) -> int:
        """What has to be read and written at least: each array once, and states that are updated twice."""
        return compulsory_bytes(self)

    @property
    def queries(self) -> int:
        """Tokens for which a result is computed."""
        return sum(self.lengths)

    def draw(self, xp: Any) -> dict[str, Any]:
        """Make the inputs with the library `xp`, numpy or cupy: the same ones every time; q and k have norm 1."""
        rng, drawn = xp.random.default_rng(0), drawn_dtype(self.dtype)
        arrays = {}
        for name, (shape, dtype) in self.inputs.items():
            if name == "cu_seqlens":
                x = xp.asarray(self.boundaries)
            elif name in ("log_g", "log_g_cumsum"):
                x = rng.standard_exponential(shape, dtype=drawn) * drawn(MEAN_GATE)
            elif name == "beta":
                x = rng.random(shape, dtype=drawn)
            else:
                x = rng.standard_normal(shape, dtype=drawn)
            if name in ("q", "k"):
                x /= xp.sqrt((x * x).sum(axis=-1, keepdims=True))
            if name == "log_g_cumsum":
                x = self._cumulated(x, xp)
            arrays[name] = x.astype(DTYPES[dtype])
        return arrays

    def _cumulated(self, gates: Any, xp: Any) -> Any:
        """Add up the gates of each chunk from its first token on."""
        first = np.concatenate([np.full(end - first, first) for first, end in self.chunks])
        sums = xp.cumsum(gates, axis=0, dtype=np.float64)
        return sums - (sums - gates)[xp.asarray(first)]


def _case(op: str, length: int, heads: int, heads_v: int | None = None, batch: int = 1, **options: Any) -> GatedCase:
    """Sequences of one length; `dtype` is bfloat16 unless it is given."""
    dtype = options.pop("dtype", "bfloat16")
    packed = op == OUTPUT
    return GatedCase("", op, dtype, (length,) * batch, heads, heads_v or heads, packed=packed, **options)


NUM_PACKED, SHORTEST, LONGEST = 64, 16, 8192


def _packed(heads: int) -> list[GatedCase]:
    """Sequences of all lengths, and the same number of tokens in sequences of one length."""
    lengths = np.geomspace(SHORTEST, LONGEST, NUM_PACKED).round().astype(int)
    np.random.default_rng(0).shuffle(lengths)
    lengths[-1] += -lengths.sum() % NUM_PACKED
    equal = (int(lengths.sum()) // NUM_PACKED,) * NUM_PACKED
    return [
        GatedCase("", CHUNKS, "bfloat16", some, heads, heads, packed=True) for some in (tuple(lengths.tolist()), equal)
    ]


def gated_cases(group: str) -> list[GatedCase]:
    """Prompts, generation, and outputs alone, for a GPU."""
    cases = [
        _case(CHUNKS, 8192, 32),
        _case(CHUNKS, 65536, 32),
        _case(CHUNKS, 8192, 16, batch=4),
        _case(CHUNKS, 8192, 8),
        _case(CHUNKS, 8192, 16, 32),
        *_packed(16),
        _case(CHUNKS, 8192, 32, dtype="float32"),
        _case(RECURRENT, 1, 32, batch=64),
        _case(OUTPUT, 8192, 32),
        _case(OUTPUT, 65536, 32),
        _case(OUTPUT, 8192, 16, 32),
        _case(OUTPUT, 65536, 16, 32),
        _case(OUTPUT, 8192, 16, 64),
        _case(OUTPUT, 8192, 32, dtype="float32"),
    ]
    return [case._replace(group=group) for case in cases]


def small_gated_cases(group: str) -> list[GatedCase]:
    """Sizes that a processor finishes in a fraction of a second."""
    features = {"head_dim": 64, "head_dim_v": 64}
    cases = [
        _case(CHUNKS, 2048, 8, dtype="float32", **features),
        _case(CHUNKS, 1024, 8, 16, dtype="float32"),
        _case(CHUNKS, 512, 4, dtype="float32", batch=8, **features),
        _case(CHUNKS, 1024, 8, dtype="float64", **features),
        _case(CHUNKS, 1024, 8, **features),
        _case(RECURRENT, 1, 16, dtype="float32", batch=8),
        _case(OUTPUT, 2048, 8, dtype="float32", **features),
        _case(OUTPUT, 1024, 8, 16, **features),
    ]
    return [case._replace(group=group) for case in cases]
