"""Problems that `python -m cuflash bench` measures: the table, and what a problem of attention is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from ..dense import attention, attention_lse
from ..plan.table import KERNELS
from ..problem.arrays import DTYPES, FLOAT_NAMES, computed_dtype
from .caches import cache_cases
from .gated import gated_cases, small_gated_cases
from .inputs import AnyCase, Array, compulsory_bytes, drawn_dtype

Window = tuple[int | None, int | None]


class Case(NamedTuple):
    """One problem of attention: arrays (batch, heads, sequence, feature) in C order, and options."""

    group: str
    dtype: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    """0: there are no values, and the lse is the result."""
    causal: bool = False
    window: Window | None = None
    softcap: float | None = None
    bias: bool = False
    """Add a bias of shape (heads, seqlen_q, seqlen_k), in the dtype of the case."""
    alibi: bool = False
    """Subtract `alibi_slopes` times the distance."""
    value_mean: float = 0.0
    value_spread: float = 1.0
    """The values are normal with this mean and standard deviation; queries and keys have 0 and 1."""

    @property
    def name(self) -> str:
        """Everything that tells this case from others, in a line."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        length = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        feature = f"{self.head_dim}" if self.head_dim_v in (0, self.head_dim) else f"{self.head_dim}/{self.head_dim_v}"
        options = ["causal" if self.causal else "full"]
        if not self.head_dim_v:
            options.append("lse alone")
        if self.window is not None:
            options.append("window " + ",".join("none" if side is None else str(side) for side in self.window))
        if self.softcap is not None:
            options.append(f"softcap {self.softcap:g}")
        if self.bias:
            options.append("bias")
        if self.alibi:
            options.append("ALiBi")
        if self.value_mean:
            options.append(f"values {self.value_mean:g} +- {self.value_spread:g}")
        return f"{self.dtype} B{self.batch} H{heads} N{length} D{feature} {' '.join(options)}"

    @property
    def inputs(self) -> dict[str, Array]:
        """Arrays by argument name."""
        rows_k = self.batch, self.kv_heads, self.seqlen_k
        inputs = {
            "q": Array((self.batch, self.heads, self.seqlen_q, self.head_dim), self.dtype),
            "k": Array((*rows_k, self.head_dim), self.dtype),
        }
        if self.head_dim_v:
            inputs["v"] = Array((*rows_k, self.head_dim_v), self.dtype)
        if self.bias:
            inputs["bias"] = Array((self.heads, self.seqlen_q, self.seqlen_k), self.dtype)
        if self.alibi:
            inputs["alibi_slopes"] = Array((self.heads,), "float32")
        return inputs

    @property
    def shape_out(self) -> tuple[int, ...]:
        """Shape of the result."""
        rows = self.batch, self.heads, self.seqlen_q
        return (*rows, self.head_dim_v) if self.head_dim_v else rows

    @property
    def dtype_out(self) -> str:
        """Type of the result."""
        return self.dtype if self.head_dim_v else computed_dtype(self.dtype)

    @property
    def results(self) -> dict[str, Array]:
        """The array that is written, by argument name."""
        return {"out": Array(self.shape_out, self.dtype_out)}

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        return attention if self.head_dim_v else attention_lse

    @property
    def kernels(self) -> list[str]:
        """Rows of the table."""
        return [spec.name for spec in KERNELS]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the function that are not arrays."""
        given = {"causal": self.causal or None, "window": self.window, "softcap": self.softcap}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products, for the pairs that are visible."""
        pairs = visible_pairs(self.seqlen_q, self.seqlen_k, self.causal, self.window)
        return 2 * pairs * (self.head_dim + self.head_dim_v) * self.batch * self.heads

    @property
    def bytes(self) -> int:
        """What has to be read and written at least: each array once."""
        return compulsory_bytes(self)

    @property
    def queries(self) -> int:
        """Tokens for which a result is computed."""
        return self.batch * self.seqlen_q

    def draw(self, xp: Any) -> dict[str, Any]:
        """Make the inputs with the library `xp`, numpy or cupy: the same ones every time."""
        rng, drawn = xp.random.default_rng(0), drawn_dtype(self.dtype)
        arrays = {}
        for name, (shape, dtype) in self.inputs.items():
            if name == "alibi_slopes":
                arrays[name] = xp.asarray(alibi_slopes(self.heads))
                continue
            x = rng.standard_normal(shape, dtype=drawn)
            if name == "v" and (self.value_mean, self.value_spread) != (0.0, 1.0):
                x *= drawn(self.value_spread)
                x += drawn(self.value_mean)
            arrays[name] = x.astype(DTYPES[dtype])
        return arrays


def alibi_slopes(heads: int) -> np.ndarray:
    """Slopes of Press, Smith and Lewis (2022) for a power of two of heads: 2^(-8/heads), its square, and so on."""
    slopes: np.ndarray = np.exp2(np.arange(1, heads + 1, dtype=np.float32) * np.float32(-8 / heads))
    return slopes


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: Window | None) -> int:
    """Count the pairs of a query and a key that it sees, the last query standing at the last key."""
    left, right = (None, None) if window is None else window
    if causal:
        right = 0 if right is None else min(right, 0)

    def sum_below(limit: int) -> int:
        """Of all numbers from 0 on, those above `seqlen_k` counted as that."""
        whole = min(max(limit, 0), seqlen_k)
        return whole * (whole - 1) // 2 + (max(limit, 0) - whole) * seqlen_k

    def pairs_up_to(edge: int) -> int:
        """Those whose key is no farther than `edge` behind the query."""
        first = seqlen_k - seqlen_q + edge + 1
        return sum_below(first + seqlen_q) - sum_below(first)

    pairs = seqlen_q * seqlen_k if right is None else pairs_up_to(right)
    return pairs if left is None else pairs - pairs_up_to(-left - 1)


def _square(group: str, dtype: str, heads: int, seqlen: int, head_dim: int, batch: int = 1, **options: Any) -> Case:
    """As many queries as keys; values have the features and, unless `kv_heads` is given, keys the heads of queries."""
    kv_heads = options.pop("kv_heads", heads)
    head_dim_v = options.pop("head_dim_v", head_dim)
    return Case(group, dtype, batch, heads, kv_heads, seqlen, seqlen, head_dim, head_dim_v, **options)


def _tokens(dtype: str, head_dim: int, seqlen: int, tokens: int, hidden: int, causal: bool) -> Case:
    """As many sequences and heads as make up a number of tokens and a width; the group is named after the dtype."""
    batch, heads = max(1, tokens // seqlen), max(1, hidden // head_dim)
    return _square(dtype, dtype, heads, seqlen, head_dim, batch, causal=causal)


def _wide(dtype: str) -> list[Case]:
    """float32 and float64: 8k tokens, width 1024."""
    return [_tokens(dtype, d, 4096, 8192, 1024, causal) for d in (32, 64, 128, 256) for causal in (False, True)]


_MORE_FLOAT32 = [
    _tokens("float32", 512, 4096, 8192, 1024, False),
    _tokens("float32", 64, 512, 8192, 1024, True),
    _tokens("float32", 64, 16384, 16384, 1024, False),
]


def _half(dtype: str) -> list[Case]:
    """The 16-bit types: 16k tokens, width 2048."""
    return [
        _tokens(dtype, head_dim, seqlen, 16384, 2048, causal)
        for head_dim in (32, 64, 80, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 2048, 4096, 16384)
    ]


def _options() -> list[Case]:
    """What kernels like to leave out: shared key heads, windows, softcap, bias, odd lengths and features."""
    group = "options"
    return [
        _square(group, "bfloat16", 32, 4096, 128, 4, kv_heads=8, causal=True),
        _square(group, "bfloat16", 64, 2048, 128, 4, kv_heads=1, causal=True),
        _square(group, "float32", 16, 4096, 64, 2, kv_heads=4, causal=True),
        _square(group, "float16", 16, 16384, 128, causal=True, window=(1023, 0)),
        _square(group, "bfloat16", 16, 4096, 128, 4, window=(255, 255)),
        _square(group, "bfloat16", 16, 4096, 128, 4, causal=True, softcap=30.0),
        _square(group, "float16", 32, 2048, 64, 4, bias=True),
        _square(group, "bfloat16", 16, 4096, 128, 4, causal=True, alibi=True),
        _square(group, "float16", 16, 1000, 128, 2, causal=True),
        _square(group, "float16", 16, 4097, 64, 2),
        _square(group, "float16", 24, 3000, 96, 2, kv_heads=8, causal=True),
        _square(group, "float16", 12, 197, 64, 32),
        _square(group, "float16", 16, 2000, 160, 2, causal=True),
        _square(group, "bfloat16", 16, 4096, 192, 2, head_dim_v=128, causal=True),
        Case(group, "float16", 2, 16, 16, 4096, 77, 40, 40),
    ]


def _decode() -> list[Case]:
    """One new token against a cache: the time goes into reading it."""
    caches = (1, 8192), (1, 131072), (16, 8192), (64, 8192), (8, 65536)
    return [
        Case("decode", "bfloat16", batch, heads, kv_heads, 1, seqlen_k, 128, 128, causal=True)
        for batch, seqlen_k in caches
        for heads, kv_heads in ((32, 32), (32, 8), (64, 1))
    ]


def _lse() -> list[Case]:
    """The lse alone, of problems that other groups have with values, and of point clouds, with and without."""
    alone = [
        _tokens(dtype, head_dim, 4096, tokens, hidden, False)._replace(group="lse", head_dim_v=0)
        for dtype, tokens, hidden in (("float16", 16384, 2048), ("float32", 8192, 1024), ("float64", 8192, 1024))
        for head_dim in (64, 128)
    ]
    clouds = [_square("lse", "float32", 1, 100_000, 3, head_dim_v=head_dim_v) for head_dim_v in (0, 3)]
    return [*alone, *clouds]


def _drift() -> list[Case]:
    """Values with a mean: sums that lose bits as they grow show here, and hide in values around 0."""
    return [
        Case("drift", dtype, 1, 2, 2, 64, seqlen_k, 128, 128, value_mean=1.0, value_spread=0.1)
        for dtype in ("float16", "bfloat16")
        for seqlen_k in (1024, 8192, 65536, 262144)
    ]


def _cpu() -> list[Case]:
    """Sizes that a processor finishes in a fraction of a second."""
    return [
        _square("cpu", "float32", 16, 2048, 64),
        _square("cpu", "float32", 16, 2048, 64, causal=True),
        _square("cpu", "float32", 16, 2048, 128),
        _square("cpu", "float32", 16, 512, 64),
        _square("cpu", "float32", 1, 4096, 64),
        _square("cpu", "float32", 16, 2048, 64, kv_heads=4, causal=True, window=(255, 0)),
        _square("cpu", "float64", 16, 1024, 64),
        _square("cpu", "float16", 16, 1024, 64),
        _square("cpu", "bfloat16", 16, 1024, 64),
    ]


def _small() -> list[Case]:
    """Small problems for a processor: what a call costs beside its arithmetic, alone and by the thousand."""
    group = "small"
    shapes = [
        (5000, 2, 4, 4, 16), (1000, 4, 1, 16, 32), (100_000, 1, 1, 8, 64), (1, 100_000, 1, 1, 16), (64, 8, 1, 128, 64),
        (1, 8, 1, 8192, 64), (64, 4, 32, 32, 32), (128, 16, 16, 16, 128), (1, 1, 1, 1, 64), (1, 1, 16, 16, 64),
        (1, 8, 64, 64, 64), (1, 1, 256, 256, 64), (1, 1, 512, 512, 64), (1, 8, 16, 2048, 64), (1, 64, 1, 128, 64),
        (1, 100, 300, 300, 64),
    ]  # fmt: skip
    cases = [
        Case(group, dtype, batch, heads, heads, seqlen_q, seqlen_k, head_dim, head_dim, causal)
        for dtype in ("float32", "float64")
        for causal in (False, True)
        for batch, heads, seqlen_q, seqlen_k, head_dim in shapes
    ]
    return [case for case in cases if case.seqlen_q > 1 or not case.causal]


SWEEP_HEAD_DIMS = (8, 16, 32, 64, 128, 256, 512)
SWEEP_LENGTHS = (512, 1024, 2048, 4096, 16384)
SWEEP_SCORES, SWEEP_ELEMENTS, SWEEP_HEADS = 2**31, 2**24, 256
"""Limits for many heads: a score matrix of 17 GB in float64, of which naive and PyTorch hold a few, an array of 128 MB,
and enough heads to fill any GPU."""


def _sweep() -> list[Case]:
    """From small to large in every dtype, one head or many, full or causal.

    For each head_dim and length every dtype has one of the four, so that each head_dim and each length has all.
    """
    cases = []
    variants = ((False, False), (True, True), (False, True), (True, False))
    for t, dtype in enumerate(FLOAT_NAMES):
        for i, head_dim in enumerate(SWEEP_HEAD_DIMS):
            for j, seqlen in enumerate(SWEEP_LENGTHS):
                many, causal = variants[(t + i + j) % 4]
                most = min(SWEEP_HEADS, SWEEP_SCORES // seqlen**2, SWEEP_ELEMENTS // (seqlen * head_dim))
                count = most if many else 1
                heads = min(count, 8)
                cases.append(_square("sweep", dtype, heads, seqlen, head_dim, count // heads, causal=causal))
    return cases


def _points() -> list[Case]:
    """Point clouds: one head with few features, as in kernel regression and optimal transport."""
    return [
        Case("points", dtype, 1, 1, 1, seqlen, seqlen, head_dim, head_dim_v)
        for dtype in ("float32", "float64")
        for seqlen in (20_000, 100_000)
        for head_dim, head_dim_v in ((1, 1), (3, 1), (3, 3), (16, 1), (16, 16))
    ]


GROUPS: dict[str, Sequence[AnyCase]] = {
    "float32": _wide("float32") + _MORE_FLOAT32,
    "float64": _wide("float64"),
    "float16": _half("float16"),
    "bfloat16": _half("bfloat16"),
    "options": _options(),
    "decode": _decode(),
    "caches": cache_cases("caches"),
    "lse": _lse(),
    "drift": _drift(),
    "points": _points(),
    "cpu": _cpu(),
    "small": _small(),
    "gated": gated_cases("gated"),
    "gated-cpu": small_gated_cases("gated-cpu"),
    "sweep": _sweep(),
}
"""The table, by name of the group."""

OVERHEADS = "overheads"
"""Name of the group that has no cases: import, host time per call, compile time, memory."""

DEFAULT_GROUPS = {
    "gpu": [*(name for name in GROUPS if name not in ("cpu", "small", "gated-cpu", "sweep")), OVERHEADS],
    "numpy": ["cpu", "small", "drift", "gated-cpu", OVERHEADS],
}
"""What is measured when nothing is chosen, by back end; the sweep and the error table are runs of their own."""

QUICK_FLOPS = {"gpu": 3 * 10**11, "numpy": 6 * 10**9}
"""Largest case of a quick run: a fraction of a second for the slowest kernel."""
QUICK_CASES = 3


def quick(groups: Iterable[Sequence[AnyCase]], backend: str) -> list[AnyCase]:
    """Choose a few cases of each group: the first, the last and one between, none of them large.

    The groups take turns, as time may end before the cases do.
    """
    chosen = []
    for cases in groups:
        small = [case for case in cases if case.flops <= QUICK_FLOPS[backend]]
        if len(small) > QUICK_CASES:
            small = [small[i * (len(small) - 1) // (QUICK_CASES - 1)] for i in range(QUICK_CASES)]
        chosen.append(small)
    return [case for turn in zip_longest(*chosen) for case in turn if case is not None]
