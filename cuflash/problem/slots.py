"""Slots of a cache as a call names them, and other integers that its methods take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np

from .checks import parse_integer

Slots = SupportsIndex | slice | Sequence[SupportsIndex] | np.ndarray | None
"""A slot, some of them, or all (None)."""
Numbers = range | tuple[int, ...]
"""Checked slots; a range is a view of the arrays on the device."""

MOST = 2**31 - 1
"""Lengths and numbers of pages are int32."""


def integer_of(name: str, x: Any, low: int, high: int = MOST, alternative: str = "") -> int:
    """Read an int of a range; TypeError or ValueError for what is none, or lies outside."""
    expected = (f"an int of {low} to {high}" if high != MOST else f"an int, at least {low}") + alternative
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(f"{name} is a GPU array, expected {expected}: reading it would wait for the GPU")
    number = parse_integer(name, x, expected)
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}, expected {low} to {high}")
    return number


def slot_numbers(name: str, slots: Slots, num_slots: int) -> Numbers:
    """Read which slots are meant: different ones, that there are."""
    if slots is None:
        return range(num_slots)
    if isinstance(slots, slice):
        try:
            return range(*slots.indices(num_slots))
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name} is {slots}, expected a slice of slots: {error}") from None
    if isinstance(slots, (list, tuple, range)) or (isinstance(slots, np.ndarray) and slots.ndim):
        numbers = tuple(integer_of(f"{name}[{i}]", x, 0, num_slots - 1) for i, x in enumerate(slots))
        if len(set(numbers)) < len(numbers):
            twice = next(x for i, x in enumerate(numbers) if x in numbers[:i])
            raise ValueError(f"{name} has slot {twice} twice, expected different ones")
        return numbers
    number = integer_of(name, slots, 0, num_slots - 1, ", a slice or a sequence of int")
    return range(number, number + 1)


def slice_of(numbers: Numbers) -> slice:
    """Return the part of an array's first axis that a range of slots is."""
    assert isinstance(numbers, range), "others were refused"
    if not numbers:
        return slice(0, 0)
    # A range that goes down to 0 stops at -1, which as part of a slice would be the last slot.
    return slice(numbers.start, None if numbers.stop < 0 else numbers.stop, numbers.step)
