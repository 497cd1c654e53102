"""What follows from the traits of a problem: the kernel, its tiles, and what each of them is compiled with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..problem.problem import Traits
from ..settings import Settings
from .axes import BATCH_AXES
from .cost import MAX_SPLITS, Choice, Cost, Lengths, Pace, cheapest, pace_of, rounded, times_of_walking, walk_of
from .features import Macros, feature_macros
from .partial import partial_traits
from .table import KERNELS, Device, KernelSpec, Tile, choose_row
from .tiles import APPENDING, PREPARING

CACHE_SIZE = 4096


class Program(NamedTuple):
    """What is compiled: a CUDA source and the macros it is compiled with, which hold no lengths and no strides."""

    kernel: str
    macros: Macros
    shared_memory: int
    """Bytes per block."""
    takes_maps: bool = False
    """Whether it has maps of tiles of keys and values behind its struct of arguments."""


class Prediction(NamedTuple):
    """What the time model says of a tile."""

    time: float
    """Of the GPU, in microseconds; with splits that of a call, whose two launches keep the host busy for longer."""
    kernel: str
    tile: str
    num_splits: int
    """By which the tile takes the least time."""


class Build:
    """What follows from traits, device and settings: the kernel, its tiles and their programs.

    Attributes
    ----------
    spec : KernelSpec
    tiles : list of Tile
    programs : dict of (Tile, bool) to Program
        As they are asked for; the second says whether their results are partial.
    """

    def __init__(self, spec: KernelSpec, traits: Traits, device: Device, settings: Settings) -> None:
        self.spec = spec
        self.tiles = [tile for tile in spec.tiles(traits, device) if settings.tile in ("", str(tile))]
        self._traits = traits
        self._device = device
        self._cost: Cost = self.spec.cost(traits)
        bucket = self.spec.head_dim_bucket
        features = bucket(traits.head_dim) + bucket(traits.head_dim_v)
        # Packed sequences are not split by themselves: the host does not know their lengths, and a captured call that
        # is given `out` has no `workspace` to be given too.
        splits, partial = "out_dtype" in self.spec.features and not traits.is_varlen, partial_traits(traits)
        self._splittable = splittable = [
            tile for tile in (self.spec.tiles(partial, device) if splits else []) if not tile.walks_on
        ]
        self._paces: list[Pace] = [
            pace_of(
                self._cost,
                tile,
                features,
                self.spec.min_blocks(traits, tile, device),
                MAX_SPLITS if tile in splittable else 1,
                self.spec.min_blocks(partial, tile, device) if tile in splittable else 0,
                self.spec.prepared_row(traits),
            )
            for tile in self.tiles
        ]
        self._preparing: Program | None = None
        self._appending: Program | None = None
        self._programs: dict[tuple[Tile, bool], Program] = {}

    def choose(self, lengths: Lengths, prepares: bool = True) -> Choice:
        """Tile and splits that take the least time. No tile `prepares` where that can't be."""
        multiprocessors = self._device.num_multiprocessors
        lengths = Lengths(*rounded(lengths))
        choice = cheapest(self._paces, self._cost, lengths, self._traits.head_dim_v, multiprocessors, prepares)
        pace = self._paces[choice.tile_idx]
        if not pace.tile.walks_on:
            return choice
        tiles, pairs = times_of_walking(pace, walk_of(lengths, pace.tile), multiprocessors)
        return choice._replace(in_pairs=pairs <= tiles)

    def predict(self, lengths: Lengths, prepares: bool) -> list[Prediction]:
        """Say what each tile takes, with the number of splits by which that is least."""
        lengths, multiprocessors = Lengths(*rounded(lengths)), self._device.num_multiprocessors
        choices = [
            cheapest([pace], self._cost, lengths, self._traits.head_dim_v, multiprocessors, prepares)
            for pace in self._paces
        ]
        return [
            Prediction(choice.time, self.spec.name, str(tile), choice.num_splits)
            for tile, choice in zip(self.tiles, choices, strict=True)
            if choice.time != float("inf")
        ]

    def resident_blocks(self, tile_idx: int, is_split: bool) -> int:
        """Blocks of a tile that the device holds."""
        pace = self._paces[tile_idx]
        return (pace.split_blocks if is_split else len(pace.times)) * self._device.num_multiprocessors

    def splitting(self, tile: Tile, num_splits: int, seqlen_k: int) -> tuple[Tile, int]:
        """Return the tile, or one that keys can be split for, and how many splits there are at most of those wanted."""
        if num_splits == 1 or not self._splittable:
            return tile, 1
        tile = tile if tile in self._splittable else self._splittable[0]
        return tile, max(1, min(num_splits, -(-seqlen_k // tile.block_n), MAX_SPLITS))

    def program(self, tile: Tile, is_split: bool) -> Program:
        """What is compiled for a tile, whose results are partial if its keys are split; remembered."""
        program = self._programs.get((tile, is_split))
        if program is None:
            traits = partial_traits(self._traits) if is_split else self._traits
            macros = _macros(self.spec, traits, tile, self._device)
            program = Program(self.spec.name, macros, self.spec.shared_memory(traits, tile), self.spec.takes_maps)
            self._programs[tile, is_split] = program
        return program

    def appending(self) -> Program:
        """What appends keys and values to a cache; remembered."""
        if self._appending is None:
            traits = self._traits
            lengths = ("SEQLENS_K", int(traits.seqlens_k)), ("PAGED", int(traits.page_table))
            macros = *_array_macros(self.spec, traits), *_tile_macros(APPENDING), *lengths
            self._appending = Program("append_keys", macros, 0)
        return self._appending

    def preparing(self) -> Program:
        """What makes keys and values ready for tiles that want that; remembered."""
        if self._preparing is None:
            spec, traits = self.spec.preparing, self._traits
            assert spec is not None, "else no tile wants that"
            macros = *_array_macros(self.spec, traits), *_tile_macros(PREPARING), *spec.macros(traits)
            self._preparing = Program(spec.name, macros, spec.shared_memory(traits))
        return self._preparing


class Builds(list[Build]):
    """What follows from traits: a build, and others if their kernels may take less time."""

    def __init__(self, builds: Iterable[Build]) -> None:
        super().__init__(builds)
        self._chosen: dict[tuple[int | None, ...], tuple[Build, Choice]] = {}

    def choose(self, lengths: Lengths, prepares: bool = True) -> tuple[Build, Choice]:
        """Return the build that takes the least time, and what it chooses, remembered; of equal ones the first."""
        key = prepares, *rounded(lengths)
        chosen = self._chosen.get(key)
        if chosen is None:
            if len(self._chosen) >= CACHE_SIZE:
                self._chosen.clear()
            found = [(build, build.choose(lengths, prepares)) for build in self]
            chosen = self._chosen[key] = min(found, key=lambda pair: pair[1].time)
            build, choice = chosen
            if choice.time == float("inf"):
                raise ValueError(
                    f"tile {str(build.tiles[0])!r} cannot serve this call: keys and values are made ready by another "
                    f"launch, which takes a workspace, known lengths and no more than {BATCH_AXES} leading axes"
                )
        return chosen

    def predict(self, lengths: Lengths, prepares: bool) -> list[Prediction]:
        """Say what each tile of each kernel takes, the least first."""
        return sorted(prediction for build in self for prediction in build.predict(lengths, prepares))


_builds: dict[tuple[Traits, Device, Settings], Builds] = {}


def find_builds(traits: Traits, device: Device, settings: Settings) -> Builds:
    """Return what follows from the traits, remembered.

    ValueError if `options(kernel=..., tile=...)` asks for what cannot serve them.
    """
    key = traits, device, settings
    builds = _builds.get(key)
    if builds is None:
        if len(_builds) >= CACHE_SIZE:
            _builds.clear()
        specs = [choose_row(KERNELS, traits, device, settings)]
        if not settings.kernel:
            others = [spec for spec in KERNELS if spec.name in specs[0].yields_to]
            specs += [spec for spec in others if spec.refusal(traits, device) is None]
        if settings.tile:
            specs = _having_tile(specs, traits, device, settings.tile)
        builds = _builds[key] = Builds(Build(spec, traits, device, settings) for spec in specs)
    return builds


def _having_tile(specs: list[KernelSpec], traits: Traits, device: Device, tile: str) -> list[KernelSpec]:
    """Return the first row that has a tile of this name; a ValueError says which there are."""
    names = {spec.name: [str(tile) for tile in spec.tiles(traits, device)] for spec in specs}
    having = [spec for spec in specs if tile in names[spec.name]]
    if not having:
        known = "; ".join(f"kernel {name!r} has {', '.join(dict.fromkeys(those))}" for name, those in names.items())
        raise ValueError(f"tile {tile!r} cannot serve this call: {known} for it")
    return having[:1]


def build_of_rows(traits: Traits, device: Device, settings: Settings) -> Build:
    """Return a build of which the bits of a row depend on no other row; that of the settings if they name one."""
    if settings.kernel or settings.tile:
        return find_builds(traits, device, settings)[0]
    specs = [spec for spec in KERNELS if spec.row_by_row and spec.refusal(traits, device) is None]
    return find_builds(traits, device, settings._replace(kernel=specs[0].name))[0]


def _array_macros(spec: KernelSpec, traits: Traits) -> Macros:
    return (
        ("DTYPE", f"CUFLASH_{traits.dtype.upper()}"),
        ("HEAD_DIM", spec.head_dim_bucket(traits.head_dim)),
        ("HEAD_DIM_V", spec.head_dim_bucket(traits.head_dim_v)),
        ("ALIGNMENT", traits.alignment),
    )


def _tile_macros(tile: Tile) -> Macros:
    return ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n), ("THREADS", tile.num_threads)


def _macros(spec: KernelSpec, traits: Traits, tile: Tile, device: Device) -> Macros:
    return (
        *_array_macros(spec, traits),
        ("OUT_DTYPE", f"CUFLASH_{traits.out_dtype.upper()}"),
        *_tile_macros(tile),
        ("STAGES", tile.stages),
        ("MIN_BLOCKS", spec.min_blocks(traits, tile, device)),
        *feature_macros(traits, spec.caps_by_polynomial),
        *spec.macros(traits),
        *((("PREPARED", 1),) if tile.prepared else ()),
        *((("WALKS_ON", 1),) if tile.walks_on else ()),
    )
