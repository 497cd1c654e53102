"""What a problem takes with a tile and a number of splits: the plan has the choice that takes the least.

A multiprocessor works on one tile of keys in T microseconds; a block that is alone waits L for one. Of c blocks that
share a multiprocessor each takes sqrt(L^2 + (c T)^2) per tile. Blocks come in waves of as many as the device holds, and
the longest ones first. Constants are microseconds on an H200, fitted to measurements by `benchmarks/fit_cost.py`, which
says how far its choices are from the best ones; other GPUs differ in all of them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, sqrt
from typing import NamedTuple

from ..problem.problem import Problem
from .tiles import Tile

MAX_SPLITS = 128
SPLIT_CALL = 14.0
"""us that a call with two launches takes the host, which a GPU that needs less has to wait for, but in a graph."""


class Cost(NamedTuple):
    """Constants of a kernel. Features are those of a key and a value together, as the kernel pads them."""

    product: float
    """Of T: for each row, key and feature."""
    weight: float
    """Of T: for each row and key."""
    load: float
    """Of T: for each key and feature, and each time that four warps read it."""
    tile: float
    """Of T: for each tile."""
    latency: float
    """Of L: for each tile."""
    latency_load: float
    """Of L: for each key and feature."""
    copy: float
    """Of L: for each key and feature of a thread."""
    exposed_copy: float
    """Of L: the same, where there is one buffer and the copy of a tile is waited for."""
    block: float
    """For each block: it finds its tile, loads the first keys, stores."""
    block_load: float
    """For each row and feature of a thread."""
    merge: float
    """For the launch that merges partial results."""
    merge_split: float
    """For each split."""
    merge_byte: float
    """For each byte of partial results, written and read."""
    prepare: float = 0
    """Of T: for each key and feature, where a block makes ready its keys and values itself."""
    preparation: float = 0
    """For a launch that makes them ready for all blocks."""
    preparation_byte: float = 0
    """For each byte of what it makes."""
    stream: float = 0
    """For each key and feature of all heads, read once: no number of blocks gets more from memory."""
    latency_weight: float = 0
    """Of L: for each row and key of a thread, where a block multiplies nothing while it computes weights."""
    start: float = 0
    """Once, for each thread of a block: the more there are, the later all of the first ones have begun."""
    next_tile: float = 0
    """For each tile that a block goes on with, in place of `block`."""
    by_tiles: float = 1
    """Factor of the time of a tile of keys where blocks go from tile to tile: all of them are in step."""
    by_pairs: float = 1
    """The same, where they go from pair to pair of tiles."""


class Pace(NamedTuple):
    """Times of a tile."""

    tile: Tile
    block: float
    """Of a block, beside its keys."""
    times: tuple[float, ...]
    """For a tile of keys, if one block has a multiprocessor for itself, if two share it, ... if it is full."""
    most_splits: int
    split_blocks: int
    """Blocks that share a multiprocessor where results are partial: those of float32 take more registers."""
    preparation: tuple[float, float]
    """For a launch before it, and for each key of each key head; zeros if there is none."""
    stream: float
    """For each key of each key head, read once."""
    next_tile: float
    """Of a tile that a block goes on with, beside its keys."""
    by_tiles: float
    by_pairs: float
    """Factors of `times` where blocks go from tile to tile, and from pair to pair."""
    start: float
    """Until the first blocks have begun."""


def pace_of(
    cost: Cost,
    tile: Tile,
    features: int,
    max_blocks: int,
    most_splits: int,
    split_blocks: int,
    prepared_row: tuple[int, int] = (0, 0),
) -> Pace:
    """Work out the times of a tile; a multiprocessor holds `max_blocks` of it, or `split_blocks` if keys are split."""
    rows, keys, threads, stages, prepared, *_ = tile
    loads, copies = keys * features, keys * features / threads
    work = cost.product * rows * loads + cost.weight * rows * keys + cost.tile
    work += cost.load * loads * threads / 128
    if not prepared:
        work += cost.prepare * loads
    latency = cost.latency + cost.latency_load * loads + cost.copy * copies
    latency += cost.latency_weight * rows * keys / threads
    if stages == 1:
        latency += cost.exposed_copy * copies
    times = tuple(sqrt(latency**2 + (blocks * work) ** 2) for blocks in range(1, max_blocks + 1))
    preparation = (cost.preparation, cost.preparation_byte * sum(prepared_row)) if prepared else (0.0, 0.0)
    begin = cost.block + cost.block_load * rows * features / threads
    walking = cost.next_tile, cost.by_tiles, cost.by_pairs, cost.start * threads
    splitting = most_splits, min(split_blocks, max_blocks)
    return Pace(tile, begin, times, *splitting, preparation, cost.stream * features, *walking)


def time_of_preparation(pace: Pace, lengths: Lengths) -> float:
    """Time of the launch before it."""
    launch, key = pace.preparation
    return launch + key * lengths.all_keys * (lengths.num_planes // max(lengths.group_size, 1))


class Lengths(NamedTuple):
    """What of the lengths of a problem decides."""

    queries: int
    """Of a head; packed sequences: on average."""
    group_size: int
    """Query heads per key head."""
    num_planes: int
    """Query heads in all batches."""
    keys: int
    """That some query sees by its position; packed sequences: their length on average."""
    later_keys: int
    """Those of them that the first query does not see: each further query sees one more, until there are none left."""
    width: int | None
    """Keys that each query sees, where a window is closed on both sides."""
    all_keys: int = 0
    """Of a key head, whoever sees them: so many are made ready where keys are."""


def lengths_of(problem: Problem) -> Lengths:
    """Read the lengths of a problem."""
    traits, batch, heads, heads_kv, queries, all_keys, left, right, offset, *_ = problem
    group_size = heads // heads_kv if heads else 1
    num_planes = heads
    for length in batch:
        num_planes *= length
    keys = all_keys
    if traits.is_varlen:
        # The host does not know where sequences begin: as if they were equally long.
        num_sequences = max(batch[0], 1)
        queries, keys = queries // num_sequences, keys // num_sequences
        all_keys, offset = keys, keys - queries if offset is None else offset
    width, later_keys = None, 0
    if right is not None:
        if left is not None:
            width = left + right + 1
        if offset is not None:
            first = max(offset + right + 1, 0)
            keys = min(keys, queries + offset + right)
            later_keys = max(keys - first, 0)
    if left is not None and offset is not None:
        keys = min(keys, all_keys - offset + left)
    return Lengths(queries, group_size, num_planes, max(keys, 0), later_keys, width, all_keys)


def _round(length: int) -> int:
    """Round up by less than an eighth."""
    step = 1 << max(length.bit_length() - 4, 0)
    return -(-length // min(step, 64)) * min(step, 64)


_ROUNDED = [_round(length) for length in range(1024)]


def rounded(lengths: Lengths) -> tuple[int, int, int, int, int, int | None, int]:
    """Round to steps that no choice notices, so that neighbouring lengths share theirs."""
    queries, group_size, num_planes, keys, later_keys, width, all_keys = lengths
    return (
        _ROUNDED[queries] if queries < 1024 else queries + 63 & -64,
        group_size,
        num_planes,
        _ROUNDED[keys] if keys < 1024 else keys + 63 & -64,
        _ROUNDED[later_keys] if later_keys < 1024 else later_keys + 63 & -64,
        width,
        _ROUNDED[all_keys] if all_keys < 1024 else all_keys + 63 & -64,
    )


class Choice(NamedTuple):
    """The least time, and what takes it."""

    time: float
    tile_idx: int
    num_splits: int
    in_pairs: bool = False
    """Whether blocks that walk on go from pair to pair of tiles."""


def cheapest(
    paces: Sequence[Pace], cost: Cost, lengths: Lengths, features: int, multiprocessors: int, prepares: bool = True
) -> Choice:
    """Find the tile and the number of splits that take the least time.

    `features` are those of a value, of which partial results are made. No tile `prepares` where that can't be.
    """
    best = Choice(float("inf"), 0, 1)
    of_a_split = time_of_a_split(cost, lengths, features)
    tiles = []
    for tile_idx, pace in enumerate(paces):
        if not pace.tile.prepared or prepares:
            walk, before = walk_of(lengths, pace.tile), time_of_preparation(pace, lengths)
            tiles.append((before + _least_time(pace, walk, multiprocessors), tile_idx, before, walk))
    tiles.sort()  # so that what is found early rules out the most
    for least, tile_idx, before, walk in tiles:
        if least >= best.time:
            break
        time = before + time_of(paces[tile_idx], walk, multiprocessors, 1)
        if before:
            time = of_two_launches(time)
        if time < best.time:
            best = Choice(time, tile_idx, 1)
    for least, tile_idx, before, walk in tiles:
        pace = paces[tile_idx]
        for splits in splits_to_try(pace, walk, of_a_split, multiprocessors):
            merging = cost.merge + splits * of_a_split
            if least + merging >= best.time:
                break
            time = of_two_launches(before + time_of(pace, walk, multiprocessors, splits) + merging)
            if time < best.time:
                best = Choice(time, tile_idx, splits)
    return best


def of_two_launches(time: float) -> float:
    """Time of a call with two launches: of two that the host is slower than, the faster takes less."""
    return max(time, SPLIT_CALL + 0.01 * time)


def splits_to_try(pace: Pace, walk: Walk, of_a_split: float, multiprocessors: int) -> Iterator[int]:
    """Splits that fill the multiprocessors once, twice, ... wholly, and two, four and eight times all at once.

    Tiles that fill no whole number of waves leave places empty in the last one: of many short ones that is least. But
    no more than where what one more adds is what it saves; it lies between two numbers of tiles for each.
    """
    num_steps, times, largest = walk.num_steps, pace.times[: pace.split_blocks], 1
    most = min(pace.most_splits, num_steps)
    several = [waves * len(times) for waves in (2, 4, 8)]
    for blocks in (*range(1, len(times) + 1), *several) if most > 1 and walk.num_tiles else ():
        fill = min(blocks * multiprocessors // walk.num_tiles, most)
        if fill > largest:
            fewest = -(-num_steps // fill)
            enough = int(sqrt(of_a_split * num_steps / times[min(blocks, len(times)) - 1]))
            for steps in (max(fewest, enough + 1), max(fewest, enough)):
                splits = -(-num_steps // steps)  # without those that would be left with no tile
                if splits > largest:
                    largest = splits
                    yield splits


def heads_per_tile(lengths: Lengths, rows: int) -> int:
    """Query heads that share a tile: all of a group where one head's queries do not fill it, else one."""
    return lengths.group_size if lengths.queries < rows else 1


class Walk(NamedTuple):
    """What is to be done, without splits."""

    num_tiles: int
    num_steps: int
    """Tiles of keys that a tile of rows walks through, at most."""
    average: float
    """Of that number, what tiles walk through on average."""
    num_keys: int
    """Of all key heads."""
    num_pairs: int = 0
    """Of tiles, of one head and the next."""
    of_pairs: float = 1.0
    """Of `num_steps`, what each tile of the longest pair walks through on average."""


def walk_of(lengths: Lengths, tile: Tile) -> Walk:
    """Count the tiles of a problem."""
    rows, block_n = tile.block_m, tile.block_n
    queries, group_size, num_planes, keys, later_keys, width, _ = lengths
    packed_heads = heads_per_tile(lengths, rows)
    tiles_of_plane, planes = -(-queries * packed_heads // rows), num_planes // packed_heads
    num_tiles, num_pairs = tiles_of_plane * planes, tiles_of_plane * -(-planes // 2)
    tile_queries = max(min(rows // packed_heads, queries), 1)
    num_keys = keys * (num_planes // max(group_size, 1))
    if width is not None:
        # Where each warpgroup passes by keys that others see, they are as far apart as buffers let them.
        apart = min(rows - 64, (tile.stages - 1) * block_n) if tile.passes_by else 0
        keys = min(keys, width + max(tile_queries - apart, 1) - 1)
    later_keys = min(later_keys, keys) - tile_queries + 1
    if later_keys <= 0 or keys == 0:
        return Walk(num_tiles, -(-keys // block_n), 1.0, num_keys, num_pairs)
    # Of a pair one sees the more keys the fewer the other does, until one sees all.
    fewer = fewer_of_pairs = max(later_keys - (queries - tile_queries) / 2, 0.0)
    if later_keys < queries:
        fewer = later_keys * (later_keys + tile_queries) / (2 * queries)
    # Where tiles of rows end in the middle of one of keys, that is walked through all the same: by half of it more.
    num_steps, beyond = -(-keys // block_n), (block_n - gcd(tile_queries, block_n)) / 2
    average, of_pairs = (min((keys - some + beyond) / block_n / num_steps, 1.0) for some in (fewer, fewer_of_pairs))
    return Walk(num_tiles, num_steps, average, num_keys, num_pairs, of_pairs)


def time_of_a_split(cost: Cost, lengths: Lengths, features: int) -> float:
    """Time that each split takes beside the work they share: partial results, written and read by a second launch."""
    return cost.merge_split + cost.merge_byte * 8 * features * lengths.queries * lengths.num_planes


def time_of(pace: Pace, walk: Walk, multiprocessors: int, splits: int) -> float:
    """Time of all blocks."""
    if pace.tile.walks_on:
        time = min(times_of_walking(pace, walk, multiprocessors))
    else:
        time = _time_of_blocks(pace, walk, multiprocessors, splits)
    of_blocks, of_memory = max(time - pace.block, 0.0), pace.stream * walk.num_keys
    return pace.start + pace.block + float((of_blocks**CORNER + of_memory**CORNER) ** (1 / CORNER))


CORNER = 5
"""How near the larger of two times is to what both take: memory and blocks take turns to be the limit."""


def times_of_walking(pace: Pace, walk: Walk, multiprocessors: int) -> tuple[float, float]:
    """Time of as many blocks as the device holds, which go from tile to tile, or from pair to pair.

    Of tiles, and of pairs, the longest ones decide.
    """
    resident, begin, of_keys = len(pace.times) * multiprocessors, pace.block - pace.next_tile, pace.times[-1]
    longest = pace.next_tile + walk.num_steps * of_keys * pace.by_tiles
    pair = 2 * (pace.next_tile + walk.num_steps * walk.of_pairs * of_keys * pace.by_pairs)
    return begin + -(-walk.num_tiles // resident) * longest, begin + -(-walk.num_pairs // resident) * pair


def _least_time(pace: Pace, walk: Walk, multiprocessors: int) -> float:
    """The same, if blocks waited for nothing but each other, or for memory alone; no split takes less."""
    of_blocks = walk.num_tiles * walk.num_steps * walk.average * pace.times[-1] / (len(pace.times) * multiprocessors)
    return pace.start + pace.block + max(of_blocks, pace.stream * walk.num_keys)


def _time_of_blocks(pace: Pace, walk: Walk, multiprocessors: int, splits: int) -> float:
    """The same, if memory had no limit."""
    num_blocks, num_steps, average = walk.num_tiles * splits, -(-walk.num_steps // splits), walk.average
    begin, times = pace.block, pace.times if splits == 1 else pace.times[: pace.split_blocks]
    if num_blocks <= multiprocessors:
        return begin + num_steps * times[0]
    sharing = min(len(times), -(-num_blocks // multiprocessors))
    # In the end the longest block is alone.
    longest = begin + num_steps * (average * times[sharing - 1] + (1 - average) * times[0])
    resident = len(times) * multiprocessors
    if num_blocks <= resident:
        return longest
    waves, rest = divmod(num_blocks, resident)
    wave = begin + num_steps * average * times[-1]
    in_waves = waves * wave
    if rest:
        in_waves += begin + num_steps * average * times[-(-rest // multiprocessors) - 1]
    # Blocks of different lengths drift apart, so that the next ones begin while others are still at work.
    alike = SAME_WAVES + (1 - SAME_WAVES) * max(2 * average - 1, 0.0)
    return max(longest, alike * in_waves + (1 - alike) * num_blocks / resident * wave)


SAME_WAVES = 0.3
"""Share of blocks that stay in waves where their lengths are as different as those of a causal square."""
