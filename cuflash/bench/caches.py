"""Problems with a cache of keys and values that `python -m cuflash bench` measures: steps of decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..kv_cache import attention_with_kv_cache
from ..plan.table import KERNELS
from ..problem.arrays import DTYPES, ITEMSIZE
from .inputs import Array, drawn_dtype, to_host


class CacheCase(NamedTuple):
    """One step of decoding: a query of each head and sequence, for keys that a cache holds."""

    group: str
    dtype: str
    lengths: tuple[int, ...]
    """Keys of each sequence; the longest one fills its part of a contiguous cache."""
    heads: int
    kv_heads: int
    head_dim: int = 128
    page_size: int = 0
    """0: the cache is contiguous."""
    known: bool = True
    """Whether the host knows the lengths, which are all the same then; else they lie in an array on the device."""
    appends: bool = False
    """Whether the last key of each sequence is appended by the call."""

    @property
    def name(self) -> str:
        """Everything that tells this case from others, in a line."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        shortest, longest = min(self.lengths), max(self.lengths)
        length = f"{longest}" if shortest == longest else f"{shortest}..{longest}"
        options = [f"pages of {self.page_size}" if self.page_size else "contiguous"]
        options += [] if self.known else ["lengths on the device"]
        options += ["appends"] if self.appends else []
        return f"{self.dtype} cache B{len(self.lengths)} H{heads} N1x{length} D{self.head_dim} {', '.join(options)}"

    @property
    def pages(self) -> int:
        """Entries of a sequence in the page table."""
        return -(-max(self.lengths) // self.page_size)

    @property
    def inputs(self) -> dict[str, Array]:
        """Arrays by argument name."""
        batch, longest = len(self.lengths), max(self.lengths)
        rows = (
            (batch * self.pages, self.kv_heads, self.page_size) if self.page_size else (batch, self.kv_heads, longest)
        )
        cache, new = (
            Array((*rows, self.head_dim), self.dtype),
            Array((batch, self.kv_heads, 1, self.head_dim), self.dtype),
        )
        arrays = {"q": Array((batch, self.heads, 1, self.head_dim), self.dtype), "k_cache": cache, "v_cache": cache}
        if self.appends:
            arrays |= {"k_new": new, "v_new": new}
        if not self.known:
            arrays["seqlens_k"] = Array((batch,), "int32")
        if self.page_size:
            arrays["page_table"] = Array((batch, self.pages), "int32")
        return arrays

    @property
    def results(self) -> dict[str, Array]:
        """The array that is written, by argument name."""
        return {"out": self.inputs["q"]}

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        return attention_with_kv_cache

    @property
    def kernels(self) -> list[str]:
        """Rows of the table."""
        return [spec.name for spec in KERNELS]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the function that are not arrays."""
        return {"seqlens_k": self.lengths[0] - self.appends} if self.known else {}

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products."""
        return 4 * sum(self.lengths) * self.head_dim * self.heads

    @property
    def bytes(self) -> int:
        """What has to be read and written at least: keys and values in use, and each other array once."""
        used = 2 * sum(self.lengths) * self.kv_heads * self.head_dim * ITEMSIZE[self.dtype]
        others = [array for name, array in self.inputs.items() if not name.endswith("_cache")]
        return used + sum(array.nbytes for array in (*others, *self.results.values()))

    @property
    def queries(self) -> int:
        """Tokens for which a result is computed."""
        return len(self.lengths)

    def draw(self, xp: Any) -> dict[str, Any]:
        """Make the inputs with the library `xp`, numpy or cupy: the same ones every time."""
        rng, drawn = xp.random.default_rng(0), drawn_dtype(self.dtype)
        arrays = {}
        for name, (shape, dtype) in self.inputs.items():
            if name == "seqlens_k":
                arrays[name] = xp.asarray(np.array(self.lengths, np.int32) - np.int32(self.appends))
            elif name == "page_table":
                pages = np.random.default_rng(0).permutation(shape[0] * shape[1]).reshape(shape)
                arrays[name] = xp.asarray(pages.astype(np.int32))
            else:
                arrays[name] = rng.standard_normal(shape, dtype=drawn).astype(DTYPES[dtype])
        return arrays

    def keys_of(self, arrays: Mapping[str, Any], sequence: int, name: str) -> np.ndarray:
        """Keys ("k") or values ("v") of a sequence on the host, (kv_heads, length, head_dim), with the appended one."""
        cache, length = arrays[f"{name}_cache"], self.lengths[sequence]
        if self.page_size:
            found = to_host(cache[arrays["page_table"][sequence]])  # pages, kv_heads, page_size, head_dim
            found = found.swapaxes(0, 1).reshape(self.kv_heads, -1, self.head_dim)[:, :length]
        else:
            found = to_host(cache[sequence, :, :length])
        if self.appends:
            found = np.concatenate([found[:, : length - 1], to_host(arrays[f"{name}_new"][sequence])], 1)
        return found


def cache_cases(group: str) -> list[CacheCase]:
    """Pages beside contiguous caches, other head dimensions, and one long sequence among short ones."""
    even, one = (8192,) * 16, (8192,)
    uneven = (32768, *(512,) * 63)
    layouts: list[dict[str, Any]] = [{}, {"known": False}, {"page_size": 64}, {"page_size": 16}]
    cases = [
        CacheCase(group, "bfloat16", lengths, 32, kv_heads, **layout)
        for lengths, kv_heads in ((one, 8), (even, 8), (even, 32))
        for layout in layouts
    ]
    cases += [
        CacheCase(group, "bfloat16", even, 32, 8, head_dim, **layout)
        for head_dim in (64, 256)
        for layout in layouts[::2]
    ]
    cases += [CacheCase(group, "bfloat16", uneven, 32, 8, page_size=size, known=False) for size in (0, 64)]
    cases.append(CacheCase(group, "bfloat16", even, 64, 1))
    cases.append(CacheCase(group, "bfloat16", even, 32, 8, known=False, page_size=64, appends=True))
    return cases
