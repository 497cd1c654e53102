"""Which queries and keys of a whole sequence each rank holds, and in which order the parts meet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from ..problem.arrays import ArrayInfo, brief, inspect
from ..problem.checks import same_device
from ..problem.slots import integer_of

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")
MAX_RANKS = 65536


class Segment(NamedTuple):
    """Neighbouring rows of a rank's array that are neighbours in the whole sequence, too."""

    at: int
    """Row of the rank's array."""
    start: int
    """Row of the whole sequence."""
    length: int


Part = tuple[Segment, ...]
"""What meets other parts at once: a segment, or with "zigzag" one from either end of the sequence."""


def parts_of(lengths: Sequence[int], layout: Layout, num_parts: int) -> list[list[Part]]:
    """Parts of each rank, given how many rows each has.

    With "zigzag" the first half of a rank's rows counts from the beginning of the sequence, rank by rank, and the
    second half from its end.
    """
    if layout == "contiguous":
        starts = np.cumsum([0, *lengths])
        return [
            [(segment,) for segment in _cut(0, int(start), length, num_parts)]
            for start, length in zip(starts, lengths, strict=False)
        ]
    firsts = [length - length // 2 for length in lengths]
    first_starts, after = np.cumsum([0, *firsts]), np.cumsum([0, *(length // 2 for length in reversed(lengths))])
    second_starts = (sum(firsts) + after[:-1])[::-1]
    ranks: list[list[Part]] = []
    for length, first, first_start, second_start in zip(lengths, firsts, first_starts, second_starts, strict=False):
        low = _cut(0, int(first_start), first, num_parts)
        high = _cut(first, int(second_start), length - first, num_parts)
        ranks.append(list(zip(low, reversed(high), strict=True)))
    return ranks


def _cut(at: int, start: int, length: int, num_parts: int) -> list[Segment]:
    """Cut rows as evenly as can be, the longer ones first, as `numpy.array_split` does."""
    short, longer = divmod(length, num_parts)
    edges = [i * short + min(i, longer) for i in range(num_parts + 1)]
    return [Segment(at + low, start + low, high - low) for low, high in pairwise(edges)]


def seen_keys(queries: Segment, keys: Segment, offset: int, window: tuple[int | None, int | None]) -> Segment:
    """Those of a segment's keys from the first to the last that some of the queries see."""
    left, right = window
    first, last = queries.start + offset, queries.start + queries.length - 1 + offset
    low = keys.start if left is None else max(keys.start, first - left)
    end = keys.start + keys.length
    high = end if right is None else min(end, last + right + 1)
    if not queries.length or low >= high:
        return keys._replace(length=0)
    return Segment(keys.at + low - keys.start, low, high - low)


def see_alike(queries: Part, keys: Part, offset: int, right: int | None) -> bool:
    """Whether each query, which sees the keys up to `right` behind it, sees as many of them if parts are `as_one`: all
    queries see all keys, or each segment ends where its queries do."""
    reach = [(q.start + offset + (right or 0), q.length) for q in queries]
    if right is None or reach[0][0] >= keys[-1].start + keys[-1].length - 1:
        return True
    return reach == [(k.start, k.length) for k in keys]


def as_one(part: Part) -> Segment:
    """Rows of a part, taken out by `rows_of_part`, as if they lay right in front of its end."""
    length, last = sum(segment.length for segment in part), part[-1]
    return Segment(0, last.start + last.length - length, length)


def rows_of_part(x: Any, part: Part, at: int = 0) -> Any:
    """Rows of a part of an array whose first row is number `at` of the rank's: a copy unless they are neighbours."""
    pieces = [slice(segment.at - at, segment.at - at + segment.length) for segment in part]
    if _are_neighbours(part):
        return _rows(x, -2, slice(pieces[0].start, pieces[-1].stop))
    return _like(x).concatenate([_rows(x, -2, piece) for piece in pieces], axis=-2)


def put_rows(x: Any, part: Part, rows: Any) -> None:
    """Write back what `rows_of_part` gave, if that was a copy."""
    if not _are_neighbours(part):
        for segment, piece in zip(part, np.cumsum([0, *(segment.length for segment in part[:-1])]), strict=True):
            _rows(x, -2, slice(segment.at, segment.at + segment.length))[...] = _rows(
                rows, -2, slice(piece, piece + segment.length)
            )


def _are_neighbours(part: Part) -> bool:
    return all(low.at + low.length == high.at for low, high in pairwise(part))


def shard(x: Any, rank: int, size: int, *, axis: int = -2, layout: Layout = "contiguous") -> Any:
    """Rows of a whole sequence that one rank holds, divided as evenly as can be.

    Parameters
    ----------
    x : array
        The whole sequence, of NumPy or CuPy.
    rank, size : int
        Number of the rank, and of ranks.
    axis : int, optional
        Axis of the sequence.
    layout : {"contiguous", "zigzag"}, optional
        As for `attention`.

    Returns
    -------
    array
        A view for "contiguous", else a copy.

    Raises
    ------
    TypeError, ValueError
        x is no array, or has no such axis; there is no such layout or rank.

    Examples
    --------
    >>> import numpy as np
    >>> from cuflash.distributed import shard
    >>> [shard(np.arange(8), rank, 2, axis=0, layout="zigzag").tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_layout(layout)
    info = inspect("x", x)
    x, axis = info.array, _axis_of("x", info, axis)
    size = integer_of("size", size, 1, MAX_RANKS)
    rank = integer_of("rank", rank, 0, size - 1)
    length = x.shape[axis]
    ((*segments,),) = parts_of(_even_lengths(length, size), layout, 1)[rank]
    pieces = [_rows(x, axis, slice(s.start, s.start + s.length)) for s in segments]
    return pieces[0] if layout == "contiguous" else _like(x).concatenate(pieces, axis=axis)


def unshard(parts: Sequence[Any], *, axis: int = -2, layout: Layout = "contiguous") -> Any:
    """Put together what all ranks hold: the whole sequence.

    Parameters
    ----------
    parts : sequence of array
        One array for each rank, in their order; lengths may differ.
    axis, layout
        As for `shard`.

    Returns
    -------
    array
        A copy.

    Raises
    ------
    TypeError, ValueError
        parts is no list of arrays, or empty; one has no such axis; there is no such layout.
    """
    check_layout(layout)
    if not isinstance(parts, (list, tuple)):
        raise TypeError(
            f"parts is a {type(parts).__name__}, expected a list of arrays; gather gives it to one rank alone"
        )
    if not parts:
        raise ValueError("parts is empty, expected one array for each rank")
    infos = [inspect(f"parts[{rank}]", x) for rank, x in enumerate(parts)]
    axis = _axis_of("parts[0]", infos[0], axis)
    for rank, info in enumerate(infos):
        _check_alike(f"parts[{rank}]", info, infos[0], axis)
    parts = [info.array for info in infos]
    pieces = [
        (segment.start, _rows(x, axis, slice(segment.at, segment.at + segment.length)))
        for x, ((*segments,),) in zip(parts, parts_of([x.shape[axis] for x in parts], layout, 1), strict=True)
        for segment in segments
    ]
    pieces.sort(key=lambda piece: piece[0])
    return _like(parts[0]).concatenate([piece for _, piece in pieces], axis=axis)


def check_layout(layout: Any) -> None:
    """Raise ValueError for a layout that there is not."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {brief(layout)}, expected 'contiguous' or 'zigzag'")


def _axis_of(name: str, info: ArrayInfo, axis: Any) -> int:
    """Number of an axis, counted from the first one."""
    num_axes = len(info.shape)
    if not num_axes:
        raise ValueError(f"{name} has shape (), expected an axis of the sequence")
    return integer_of("axis", axis, -num_axes, num_axes - 1) % num_axes


def _check_alike(name: str, info: ArrayInfo, first: ArrayInfo, axis: int) -> None:
    """Check what an array of one rank has in common with that of the first one."""
    same_device(name, info, "parts[0]", first)
    if info.dtype != first.dtype:
        raise TypeError(f"{name} has dtype {info.dtype} but parts[0] has {first.dtype}")
    others, expected = ((*x.shape[:axis], *x.shape[axis + 1 :]) for x in (info, first))
    if len(info.shape) != len(first.shape) or others != expected:
        raise ValueError(
            f"{name} has shape {info.shape} but parts[0] has {first.shape}, expected the same along all axes but {axis}"
        )


def _even_lengths(length: int, size: int) -> list[int]:
    return [segment.length for segment in _cut(0, 0, length, size)]


def _rows(x: Any, axis: int, rows: slice) -> Any:
    return x[(slice(None),) * (axis % x.ndim) + (rows,)]


def _like(x: Any) -> Any:
    """Module of an array's own functions: numpy, or cupy without importing it."""
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]
