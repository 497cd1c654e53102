"""What calls share that differ in lengths, strides and addresses alone, and the problem of each of them.

A call is checked once for its kind. With other lengths nothing is asked again but whether these fit each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

from .arrays import strides_like
from .problem import (
    ARRAYS,
    FARTHEST_ROWS,
    Cache,
    Problem,
    Shapes,
    Strides,
    Traits,
    alignment_of,
    cache_shapes,
    dense_shapes,
    itemsizes,
    varlen_shapes,
)

_K, _V = ARRAYS.index("k"), ARRAYS.index("v")
_OUT, _LSE = _RESULTS = ARRAYS.index("out"), ARRAYS.index("lse")
_SEQLENS_K, _PAGE_TABLE, _K_NEW, _V_NEW = map(ARRAYS.index, ("seqlens_k", "page_table", "k_new", "v_new"))
_NOT_BROADCAST = *_RESULTS, _SEQLENS_K, _PAGE_TABLE, _K_NEW, _V_NEW
_CU_SEQLENS_Q, _CU_SEQLENS_K = ARRAYS.index("cu_seqlens_q"), ARRAYS.index("cu_seqlens_k")


class Kind:
    """A kind of call: all of its problem but what lengths, strides and addresses decide.

    Parameters
    ----------
    like : Problem
        Any of this kind. What lengths, strides and addresses decide is not read, beside whether it has an lse.
    given : sequence of int
        Places in `ARRAYS` of the arrays that are given, in their order. Where the operation takes no values, those that
        are given for them are not read.
    """

    def __init__(self, like: Problem, given: Sequence[int]) -> None:
        traits = like.traits
        self._like = like
        self._varlen = traits.is_varlen
        self._shapes: Callable[..., Shapes] = varlen_shapes if self._varlen else dense_shapes
        self._heads = like.num_heads_q, like.num_heads_kv
        self._head_dims = traits.head_dim, traits.head_dim_v
        self._sizes = itemsizes(like)
        self._has_values = values = traits.has_values
        self._has_lse = like.strides.lse is not None
        self._read = [(place, i) for i, place in enumerate(given) if values or place != _V]
        self._at = dict(self._read)
        axes = ((_K_NEW, 4), (_PAGE_TABLE, 2))
        self._axes = [(self._at[place], num_axes) for place, num_axes in axes if place in self._at]
        self._without_vectors = [place for place in self._at if place > _LSE] + [_LSE] * self._has_lse
        size = self._sizes[0]
        self._layout = (
            16 if (traits.head_dim | traits.head_dim_v) * size % 16 == 0 else size,
            16 if traits.head_dim_v * size % 16 == 0 else size,
            True,
        )
        self._row_axis = 0 if self._varlen else -2
        self._traits: dict[tuple[int, int, bool], Traits] = {}

    def at(
        self, shapes: Sequence[Any], strides: Sequence[Any], pointers: Sequence[int], num_keys: int | None = None
    ) -> Problem | None:
        """Return the problem of a call of this kind, None if its lengths do not fit each other.

        Parameters
        ----------
        shapes, strides
            Of the given arrays, strides in bytes.
        pointers
            Addresses in the order of `ARRAYS`, 0 of those that are not given.
        num_keys
            Of a cache with a known length, which ends there.
        """
        like = self._like
        batch, offset, cache = like.batch, like.query_offset, like.cache
        if cache is not None and num_keys is not None and not like.traits.page_table:
            q, k, v, *others = shapes
            shapes = q, (*k[:2], num_keys, k[3]), (*v[:2], num_keys, v[3]), *others
        if self._varlen:
            boundaries = shapes[self._at[_CU_SEQLENS_Q]]
            if shapes[self._at[_CU_SEQLENS_K]] != boundaries or len(boundaries) != 1 or boundaries[0] == 0:
                return None
            batch = (boundaries[0] - 1,)
            seqlen_q, seqlen_k, num_values = shapes[0][0], shapes[1][0], shapes[2][0]
        else:
            seqlen_q, seqlen_k = shapes[0][-2], shapes[1][-2]
            num_values = shapes[_V][-2] if self._has_values else seqlen_k
            if cache is not None:
                if num_values != seqlen_k or any(len(shapes[i]) != num_axes for i, num_axes in self._axes):
                    return None
                num_values = seqlen_k = self._keys_in_cache(shapes, num_keys)
                cache = self._cache(shapes)
            if like.bottom_right and not like.traits.seqlens_k:
                offset = seqlen_k - seqlen_q
        if num_values != seqlen_k:
            return None
        sizes = batch, self._heads, (seqlen_q, seqlen_k), self._head_dims
        targets = cache_shapes(*sizes, cache) if cache is not None else self._shapes(*sizes)
        found: list[Any] = [None] * len(ARRAYS)
        for place, i in self._read:
            shape, target = shapes[i], targets[place]
            if shape == target and not like.is_2d:
                found[place] = strides[i]
                continue
            if place in _NOT_BROADCAST and shape != (target[1:] if like.is_2d else target):
                return None
            steps = found[place] = broadcast_strides(shape, strides[i], target)
            if steps is None:
                return None
        if found[_OUT] is None and self._has_values:
            found[_OUT] = strides_like(targets[_OUT], found[0], self._sizes[_OUT])
        if found[_LSE] is None and self._has_lse:
            found[_LSE] = strides_like(targets[_LSE], found[0], self._sizes[_LSE])
        layout = self._layout
        if not self._all_aligned(found, pointers):
            layout = self._exact_layout(found, targets, pointers)
        traits = self._traits.get(layout)
        if traits is None:
            traits = self._traits[layout] = like.traits._replace(
                input_alignment=layout[0], result_alignment=layout[1], keys_are_tiles=layout[2]
            )
        return Problem(
            traits, batch, like.num_heads_q, like.num_heads_kv, seqlen_q, seqlen_k, like.window_left, like.window_right,
            offset, like.bottom_right, like.scale, Strides(*found), like.dtypes, like.is_2d, cache,
        )  # fmt: skip

    def _cache(self, shapes: Sequence[Any]) -> Cache:
        """How keys and values lie in a call's cache."""
        assert self._like.cache is not None, "else it has none"
        num_new = shapes[self._at[_K_NEW]][-2] if _K_NEW in self._at else 0
        pages = (0, 0, 0)
        if self._like.traits.page_table:
            pages = shapes[_K][0], shapes[_K][-2], shapes[self._at[_PAGE_TABLE]][-1]
        return Cache(num_new, *pages, self._like.cache.num_splits, self._like.cache.split_size)

    def _keys_in_cache(self, shapes: Sequence[Any], num_keys: int | None) -> int:
        """Keys of a batch, at most."""
        if not self._like.traits.page_table:
            return int(shapes[_K][-2])
        if self._like.traits.seqlens_k:
            return int(shapes[_K][-2] * shapes[self._at[_PAGE_TABLE]][-1])
        assert num_keys is not None, "it is known"
        return num_keys

    def _all_aligned(self, strides: Sequence[Any], pointers: Sequence[int]) -> bool:
        """Whether everything certainly lies as it is best (False: look closer)."""
        q, k, v, out = strides[:4] if self._has_values else (*strides[:2], *strides[:2])
        sizes = self._sizes
        if (q[-1], k[-1], v[-1], out[-1]) != sizes[:4]:
            return False
        row = self._row_axis
        if not (0 <= k[row] <= FARTHEST_ROWS and 0 <= v[row] <= FARTHEST_ROWS):
            return False
        if gcd(16, *pointers[:4], *q[:-1], *k[:-1], *v[:-1], *out[:-1]) != 16:
            return False
        for place in self._without_vectors:
            if gcd(sizes[place], pointers[place], *strides[place]) != sizes[place]:
                return False
        return True

    def _exact_layout(self, strides: Sequence[Any], targets: Shapes, pointers: Sequence[int]) -> tuple[int, int, bool]:
        """Alignments of the inputs and of what is written, and whether keys are tiles: the last fields of `Traits`."""
        widths = list(self._layout[:2])
        for i, steps in enumerate(strides):
            if steps is None:
                continue
            is_result, size = i in _RESULTS, self._sizes[i]
            alignment = alignment_of(pointers[i], targets[i], steps)
            if alignment % size or (steps and steps[-1] % size):
                widths[is_result] = 1
            elif i <= _OUT and (alignment < 16 or steps[-1] != size):
                widths[is_result] = min(widths[is_result], self._sizes[0])
        rows = [strides[i][self._row_axis] for i in (_K, _V) if strides[i] is not None]
        return widths[0], widths[1], all(0 <= step <= FARTHEST_ROWS and step % 16 == 0 for step in rows)


def broadcast_strides(shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...]) -> Any:
    """Return the strides of an array that is broadcast, 0 where it is repeated; None if it does not broadcast."""
    missing = len(target) - len(shape)
    if missing < 0:
        return None
    spread = [0] * missing
    for length, stride, wanted in zip(shape, strides, target[missing:], strict=True):
        if length == 1:
            spread.append(0)
        elif length == wanted:
            spread.append(stride)
        else:
            return None
    return tuple(spread)
