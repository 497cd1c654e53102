"""Types of arguments and results, as type checkers see them.

A result without the lse is a union with `WithoutLse`, which is no more than its name and cannot be unpacked. So
``out, lse = attention(q, k, v)``, where ``return_lse=True`` is forgotten, is an error for a type checker. NumPy's own
type would pass, as arrays can be iterated, and so would the call itself if the first axis had two entries. Who wants to
iterate over a result writes ``np.asarray(out)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypedDict, TypeVar

import numpy as np

Causal = bool | np.bool_ | Literal["bottom_right", "top_left"]
Window = tuple[SupportsIndex | None, SupportsIndex | None] | list[int] | list[int | None]
Real = float | np.floating[Any] | np.integer[Any]
Precision = Literal["ieee", "tf32"]
FloatDtype = Literal["float16", "bfloat16", "float32", "float64"] | np.dtype[Any] | type[np.generic] | type[float]

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack as Unpack

    NumpyArray = TypeVar("NumpyArray", bound=NDArray[Any])

    class PassReturnLse:
        """Named by what type checkers say."""

    class WithoutLse(np.ndarray[Any, np.dtype[Any]]):
        """Like an array of whatever library, but not a pair.

        Operators are named because those of NumPy say that the result is NumPy's.
        """

        __iter__: PassReturnLse  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any: ...

        def __add__(self, other: Any, /) -> Any: ...
        def __radd__(self, other: Any, /) -> Any: ...
        def __sub__(self, other: Any, /) -> Any: ...
        def __rsub__(self, other: Any, /) -> Any: ...
        def __mul__(self, other: Any, /) -> Any: ...
        def __rmul__(self, other: Any, /) -> Any: ...
        def __truediv__(self, other: Any, /) -> Any: ...
        def __rtruediv__(self, other: Any, /) -> Any: ...
        def __floordiv__(self, other: Any, /) -> Any: ...
        def __rfloordiv__(self, other: Any, /) -> Any: ...
        def __mod__(self, other: Any, /) -> Any: ...
        def __rmod__(self, other: Any, /) -> Any: ...
        def __pow__(self, other: Any, mod: None = None, /) -> Any: ...
        def __rpow__(self, other: Any, mod: None = None, /) -> Any: ...
        def __matmul__(self, other: Any, /) -> Any: ...
        def __rmatmul__(self, other: Any, /) -> Any: ...
        def __eq__(self, other: Any, /) -> Any: ...
        def __ne__(self, other: Any, /) -> Any: ...
        def __lt__(self, other: Any, /) -> Any: ...
        def __le__(self, other: Any, /) -> Any: ...
        def __gt__(self, other: Any, /) -> Any: ...
        def __ge__(self, other: Any, /) -> Any: ...
        def __getitem__(self, other: Any, /) -> Any: ...

    class SupportsDlpack(Protocol):
        """An array of any library that exchanges arrays by DLPack."""

        def __dlpack_device__(self) -> Any: ...

    class SupportsCudaArray(Protocol):
        """An array on a GPU of any library that has the CUDA array interface."""

        @property
        def __cuda_array_interface__(self) -> Any: ...

    AnyArray = SupportsDlpack | SupportsCudaArray
    Pair = tuple[Any, Any]

    class Options(TypedDict, total=False):
        """What both functions take; results are then arrays like the queries."""

        causal: Causal
        window: Window | None
        scale: Real | None
        softcap: Real | None
        alibi_slopes: AnyArray | None
        sinks: AnyArray | None
        precision: Precision | None

    class DenseOptions(Options, total=False):
        """What `attention` takes beside."""

        query_offset: SupportsIndex | AnyArray | None
        bias: AnyArray | None
        mask: AnyArray | None
        workspace: AnyArray | None

    class VarlenOptions(Options, total=False):
        """What `attention_varlen` takes beside."""

        max_seqlen_q: SupportsIndex | None
        max_seqlen_k: SupportsIndex | None

    class DenseResults(DenseOptions, total=False):
        """With a choice of results, whose type is left open."""

        out: AnyArray | None
        out_dtype: FloatDtype | None

    class VarlenResults(VarlenOptions, total=False):
        """Likewise."""

        out: AnyArray | None
        out_dtype: FloatDtype | None
