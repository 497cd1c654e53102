"""Arrays for tests, in every layout, inside memory that is NaN wherever nothing belongs: a part of `testing`."""

from __future__ import annotations

from typing import Any

import numpy as np

GUARD_BYTES = 512
"""Poisoned bytes in front of and behind every array."""
POISON = 0xFF
"""Every byte of poisoned memory: NaN in all four float formats."""


def _reverse(shape: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], int, int]:
    strides, size = _packed(shape, itemsize)
    return tuple(-step for step in strides), size - itemsize if size else 0, size


def _packed(
    shape: tuple[int, ...], itemsize: int, order: list[int] | None = None, gap: int = 0
) -> tuple[tuple[int, ...], int]:
    """Strides of axes packed in the given order (outermost first), `gap` bytes between rows of the innermost one."""
    order = list(range(len(shape))) if order is None else order
    strides = [0] * len(shape)
    step = itemsize
    for place, axis in enumerate(reversed(order)):
        strides[axis] = step
        step *= max(shape[axis], 1)
        if place == 0:
            step += gap
    return tuple(strides), step if 0 not in shape else 0


def _layout(name: str, shape: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], int, int]:
    """Return strides in bytes, offset of the first element and bytes in all."""
    axes = list(range(len(shape)))
    if name == "contiguous":
        return _packed(shape, itemsize)[0], 0, _packed(shape, itemsize)[1]
    if name == "swapped":  # (batch, sequence, heads, feature), seen through swapaxes
        order = [*axes[:-3], axes[-2], axes[-3], axes[-1]] if len(axes) > 2 else axes
        strides, size = _packed(shape, itemsize, order)
        return strides, 0, size
    if name == "transposed":  # feature axis outside the sequence axis
        strides, size = _packed(shape, itemsize, [*axes[:-2], axes[-1], axes[-2]])
        return strides, 0, size
    if name == "reversed":
        return _reverse(shape, itemsize)
    if name == "gaps":  # rows on 16-byte boundaries only by chance, first element off by one
        strides, size = _packed(shape, itemsize, gap=3 * itemsize)
        return strides, itemsize, size + itemsize
    if name == "every_second":
        strides, size = _packed((*shape[:-1], 2 * shape[-1]), itemsize)
        return (*strides[:-1], 2 * itemsize), 0, size
    if name == "odd_bytes":  # no element on its natural boundary
        strides, size = _packed(shape, itemsize, gap=1)
        return strides, 1, size + 1
    if name == "broadcast":
        strides, size = _packed(shape[-2:], itemsize)
        return (0,) * (len(shape) - 2) + strides, 0, size
    raise ValueError(f"no layout {name!r}")


LAYOUTS = ("contiguous", "swapped", "transposed", "reversed", "gaps", "every_second", "odd_bytes", "broadcast")


class Poisoned:
    """An array inside memory that is NaN everywhere else, on the CPU or a GPU.

    Parameters
    ----------
    xp : module
        ``numpy``, or ``cupy`` for memory on its current device.
    shape : tuple of int
    dtype : numpy.dtype
    layout : str
        One of `LAYOUTS`.
    values : array, optional
        What it holds, of that shape; NaN without.

    Attributes
    ----------
    array : array
        What a function is to be given.
    """

    def __init__(
        self, xp: Any, shape: tuple[int, ...], dtype: np.dtype, layout: str, values: np.ndarray | None = None
    ) -> None:
        strides, offset, size = _layout(layout, shape, dtype.itemsize)
        memory = np.full(size + 2 * GUARD_BYTES, POISON, np.uint8)
        if values is not None and values.size:
            view = np.ndarray(shape, dtype, memory, GUARD_BYTES + offset, strides)
            view[...] = values
        self._xp = xp
        self._offset = GUARD_BYTES + offset
        self._start = memory.copy()
        self._covered = np.zeros(memory.size, bool)
        if 0 not in shape:
            footprint = np.ndarray(
                (*shape, dtype.itemsize), np.bool_, self._covered, GUARD_BYTES + offset, (*strides, 1)
            )
            footprint[...] = True
        self._memory = xp.asarray(memory)
        if xp is np:
            self.array = np.ndarray(shape, dtype, self._memory, GUARD_BYTES + offset, strides)
        else:
            self.array = xp.ndarray(shape, dtype, self._memory.data + GUARD_BYTES + offset, strides)

    def bytes_now(self) -> np.ndarray:
        """Return the memory as it is, on the host."""
        bytes_now: np.ndarray = self._memory if self._xp is np else self._memory.get()
        return bytes_now

    def values(self) -> np.ndarray:
        """Return the array as it is, on the host. Never through CuPy's own kernels, which need aligned elements."""
        return np.ndarray(self.array.shape, self.array.dtype, self.bytes_now(), self._offset, self.array.strides)

    def unchanged(self, *, outside_only: bool = False) -> bool:
        """Whether the memory holds what it held at first.

        Parameters
        ----------
        outside_only : bool, optional
            Look at what lies outside of the array alone.
        """
        same = self.bytes_now() == self._start
        return bool((same | self._covered).all() if outside_only else same.all())
