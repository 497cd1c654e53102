"""What a problem of any operation says of itself, and its arrays: all that measuring has to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..problem.arrays import DTYPES, ITEMSIZE, ArrayInfo, contiguous_strides


class Array(NamedTuple):
    """An array without its elements, in C order."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


class AnyCase(Protocol):
    """One problem, of attention (`cases.Case`) or of the gated delta rule (`gated.GatedCase`): a named tuple."""

    @property
    def group(self) -> str:
        """Part of the table that it belongs to."""

    @property
    def dtype(self) -> str:
        """Type whose matrix product is its limit."""

    @property
    def name(self) -> str:
        """Everything that tells it from others, in a line."""

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""

    @property
    def kernels(self) -> list[str]:
        """Rows of the table for what is called."""

    @property
    def inputs(self) -> dict[str, Array]:
        """Arrays by argument name."""

    @property
    def results(self) -> dict[str, Array]:
        """Arrays that the call writes, by argument name; those that are inputs, too, are updated in place."""

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments that are not arrays."""

    @property
    def flops(self) -> int:
        """Multiplications and additions that are needed at least."""

    @property
    def bytes(self) -> int:
        """What has to be read and written at least."""

    @property
    def queries(self) -> int:
        """Tokens for which a result is computed."""

    def draw(self, xp: Any) -> dict[str, Any]:
        """Make the inputs with the library `xp`, numpy or cupy: the same ones every time."""

    def _asdict(self) -> dict[str, Any]: ...


def compulsory_bytes(case: AnyCase) -> int:
    """What has to be read and written at least: each array once, and twice if it is updated in place."""
    return sum(x.nbytes for arrays in (case.inputs, case.results) for x in arrays.values())


class Inputs(NamedTuple):
    """The arrays of a case, on the device that computes it. What a peer is given."""

    case: AnyCase
    arrays: Mapping[str, Any]
    """By argument name."""

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the function, by name."""
        return {**self.arrays, **self.case.options}

    def new_results(self, xp: Any) -> dict[str, Any]:
        """Arrays for the call to write, by argument name: NaN everywhere, or a copy of what it updates in place."""
        return {
            name: self.arrays[name].copy() if name in self.arrays else poisoned(*array, xp)
            for name, array in self.case.results.items()
        }


def make_inputs(case: AnyCase, xp: Any) -> Inputs:
    """Draw the arrays of a case with the library `xp`, numpy or cupy."""
    return Inputs(case, case.draw(xp))


def to_host(x: Any) -> np.ndarray:
    """Return a NumPy array of the same content."""
    on_host: np.ndarray = x.get() if hasattr(x, "get") else x
    return on_host


def drawn_dtype(dtype: str) -> type[np.floating[Any]]:
    """Type in which numbers are drawn: float64 arrays that hold float32 numbers would make products exact."""
    return np.float64 if dtype == "float64" else np.float32


def stand_ins(case: AnyCase) -> dict[str, Any]:
    """Describe a case's arrays, by argument name, as they would be on the first GPU."""
    return {
        name: ArrayInfo(None, shape, contiguous_strides(shape, ITEMSIZE[dtype]), dtype, 0, 0, True)
        for name, (shape, dtype) in case.inputs.items()
    }


def poisoned(shape: tuple[int, ...], dtype: str, xp: Any) -> Any:
    """Allocate an array that is NaN everywhere: what a kernel leaves out shows."""
    memory = xp.full(prod(shape) * DTYPES[dtype].itemsize, 0xFF, np.uint8)
    return xp.ndarray(shape, DTYPES[dtype], memory.data)
