"""Arrays as callers pass them, read without importing the library they come from.

`inspect` turns a NumPy array, a CuPy array, or any object with `__dlpack__` or `__cuda_array_interface__` on a GPU into
an `ArrayInfo`, `stand_in` something with `shape`, `dtype` and maybe `strides`. Repeated calls, which have been through
here once, are looked up without it.
"""

from __future__ import annotations

import operator
import sys
from inspect import Parameter
from itertools import accumulate
from operator import ge, mul
from typing import Any, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from ..cupy_cache import import_cupy

HOST = -1
"""`ArrayInfo.device` of NumPy arrays; GPU arrays hold their CUDA device number."""

GPU_DEVICES = (2, 13)
"""DLPack's kDLCUDA and kDLCUDAManaged."""

DTYPE_NAMES = {
    np.dtype(np.float16): "float16",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.float32): "float32",
    np.dtype(np.float64): "float64",
    np.dtype(np.bool_): "bool",
    **{np.dtype(name): name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
}
"""Element types that some argument accepts; anything else (byte-swapped, complex, ...) is refused by name."""

FLOAT_NAMES = ("float16", "bfloat16", "float32", "float64")
INTEGER_NAMES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ITEMSIZE: dict[str, int] = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def computed_dtype(dtype: str) -> str:
    """Type of a computation with arrays of a type; sums, an lse and states have it, too."""
    return "float64" if dtype == "float64" else "float32"


class ArrayInfo(NamedTuple):
    """What the rest of the package needs to know of an array."""

    array: Any
    """The NumPy or CuPy array (None for a stand-in)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Bytes from element to element, one per axis."""
    dtype: str
    """A name of `DTYPE_NAMES`, or, for anything else, the printed dtype."""
    pointer: int
    device: int
    """CUDA device number, or `HOST`."""
    writeable: bool


def shapes_given(infos: dict[str, ArrayInfo]) -> dict[str, tuple[int, ...]]:
    """Shapes of a call's arrays, by name."""
    return {name: info.shape for name, info in infos.items()}


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a C-ordered array."""
    strides = []
    step = itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def strides_like(shape: tuple[int, ...], like: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a new array of `shape` whose axes lie in memory in the order given by the strides `like`.

    As in `np.empty_like`, but axes without an order of their own (length 1, or stride 0 from broadcasting) keep their
    place.
    """
    if all(map(ge, like, like[1:])) and 0 not in shape and (not like or like[-1] > 0):
        return tuple(accumulate(shape[:0:-1], mul, initial=itemsize))[::-1] if shape else ()
    strides, step, inner = [0] * len(shape), itemsize, 0
    for axis in range(len(shape) - 1, -1, -1):
        length, stride = shape[axis], abs(like[axis])
        strides[axis] = step
        if length != 1:
            if stride != 0:
                if stride < inner:
                    break
                inner = stride
            step *= length or 1
    else:
        return tuple(strides)
    ordered = [axis for axis, length in enumerate(shape) if length > 1 and like[axis] != 0]
    by_stride = sorted(ordered, key=lambda axis: -abs(like[axis]))
    memory_order = list(range(len(shape)))
    for place, axis in zip(ordered, by_stride, strict=True):
        memory_order[place] = axis
    packed = contiguous_strides(tuple(shape[axis] for axis in memory_order), itemsize)
    strides = [0] * len(shape)
    for axis, stride in zip(memory_order, packed, strict=True):
        strides[axis] = stride
    return tuple(strides)


def cupy_ndarray() -> type | None:
    """CuPy's array type if CuPy has been imported by anyone, else None."""
    cupy = sys.modules.get("cupy")
    return getattr(cupy, "ndarray", None)


def inspect(name: str, x: Any) -> ArrayInfo:
    """Read one argument; TypeError, with its name, for what is not an array that cuflash takes."""
    if type(x) is ArrayInfo:
        return x
    gpu_type = cupy_ndarray()
    if gpu_type is not None and isinstance(x, gpu_type):
        return _inspect_cupy(x)
    return _inspect_numpy(name, x) if isinstance(x, np.ndarray) else _inspect_foreign(name, x)


MISSING: Any = Parameter.empty
"""Default of arguments that a call must have: what it has too many is explained first."""
_WRITTEN = ("out", "lse", "workspace", "state", "k_cache", "v_cache")
"""Arrays of which a copy would not do."""


def shape_of(x: Any) -> tuple[int, ...]:
    """Shape of an array, () for what is none, which the call refuses."""
    shape = getattr(x, "shape", ())
    return shape if isinstance(shape, tuple) else ()


def brief(x: Any) -> str:
    """Say what an argument is, in a few words however large it is."""
    if x is None:
        return "None"
    if x is MISSING:
        return "missing"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, int) and x.bit_length() > 128:
        return f"an int of {x.bit_length()} bits"
    if isinstance(x, str) and len(x) > 60:
        return f"a str of {len(x)} characters"
    if isinstance(x, (bool, int, float, complex, str, np.generic)):
        return f"{x!r}"
    if type(x) is ArrayInfo:
        return f"an array of shape {x.shape}"
    if isinstance(getattr(x, "shape", None), tuple):
        return f"a {type(x).__name__} of shape {tuple(x.shape)}"
    try:
        text = repr(x)
    except Exception:  # an int of too many digits, whatever an object raises
        text = ""
    return text if 0 < len(text) < 40 else f"a {type(x).__name__}"


def refuse(name: str, got: str, hint: str = "", copied: str = "") -> NoReturn:
    """Raise a TypeError with a hint; `copied`: one that makes a copy, in which nobody would find what is written."""
    hint += "" if name in _WRITTEN else copied
    raise TypeError(f"{name} is {got}, expected a NumPy or CuPy array, or a GPU array with __dlpack__{hint}")


def _inspect_numpy(name: str, x: np.ndarray) -> ArrayInfo:
    # NumPy imports `numpy.ma` when it is named, which a signal handler must not do in the middle of the same.
    if isinstance(x, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        hidden = " and, in attention, mask= for hidden keys" if name in ("q", "k", "v") else ""
        refuse(name, "a numpy.ma.MaskedArray", copied=f"; pass x.filled(...){hidden}")
    if isinstance(x, np.matrix):
        refuse(name, "a numpy.matrix", "; pass np.asarray(x)")
    x = np.asarray(x)  # past what a subclass may have made of it
    dtype = DTYPE_NAMES.get(x.dtype) or str(x.dtype)
    if not x.dtype.isnative:
        dtype = f"{x.dtype} (byte-swapped)"
    pointer = x.__array_interface__["data"][0]
    return ArrayInfo(x, x.shape, x.strides, dtype, pointer, HOST, x.flags.writeable)


def _inspect_cupy(x: Any, writeable: bool = True) -> ArrayInfo:
    dtype = DTYPE_NAMES.get(x.dtype) or str(x.dtype)
    data = x.data
    return ArrayInfo(x, x.shape, x.strides, dtype, data.ptr, data.device_id, writeable)


def _inspect_foreign(name: str, x: Any) -> ArrayInfo:
    if isinstance(x, type):
        refuse(name, brief(x))
    kind = f"{type(x).__module__.split('.')[0]}.{type(x).__name__}"
    if hasattr(x, "__dlpack_device__"):
        try:
            device_type = int(x.__dlpack_device__()[0])
        except Exception:  # raised for devices that DLPack has no number for
            device_type = 0
        if device_type in GPU_DEVICES:
            return _import_gpu_array(name, x, kind)
        refuse(name, f"a {kind} that is not on a CUDA device", _host_hint(x))
    if hasattr(x, "__cuda_array_interface__"):
        return _import_gpu_array(name, x, kind)
    if isinstance(x, (list, tuple)):
        refuse(name, f"a {type(x).__name__}", copied="; pass np.asarray(x)")
    if kind == "dask.Array":
        refuse(name, f"a {kind}", "; cuflash.dask.attention takes those of Dask")
    if hasattr(x, "__array__"):
        refuse(name, f"a {kind}", copied="; pass np.asarray(x)")
    if hasattr(x, "toarray"):
        refuse(name, f"a {kind}", copied="; pass x.toarray()")
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if type(shape) is tuple and dtype is not None:
        raise TypeError(f"{name} is a {kind} without data: stand-ins are for explain() and warmup()")
    refuse(name, brief(x) if type(x).__module__ == "builtins" else f"a {kind}")


def _host_hint(x: Any) -> str:
    """Say how a tensor that is not on a GPU becomes a NumPy array."""
    device = getattr(getattr(x, "device", None), "type", "cpu")
    if device == "meta":
        return "; a tensor on meta has no data"
    if not hasattr(x, "numpy"):
        return "; for CPU data pass np.asarray(x)"
    steps = ".detach()" if getattr(x, "requires_grad", False) else ""
    if device != "cpu":
        steps += ".cpu()"
    if str(getattr(x, "dtype", "")) == "torch.bfloat16":
        return f"; pass x{steps}.view(torch.int16).numpy().view(ml_dtypes.bfloat16)"
    return f"; pass x{steps}.numpy()"


def _import_gpu_array(name: str, x: Any, kind: str) -> ArrayInfo:
    try:
        cupy = import_cupy()
    except ImportError as error:
        command = "pip install 'cuflash[cuda13]', or [cuda12] for drivers before 580"
        raise TypeError(f"{name} is a {kind} on a GPU, which needs CuPy: {command}") from error
    try:
        array = _as_cupy(cupy, x)
    except Exception as error:
        raise TypeError(f"{name} is a {kind} that could not be taken as a GPU array: {error}") from error
    return _inspect_cupy(array, writeable=not _is_read_only(x))


def _as_cupy(cupy: Any, x: Any) -> Any:
    # DLPack first: it names bfloat16, and it orders the two libraries' streams.
    return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)


def _is_read_only(x: Any) -> bool:
    try:
        return bool(x.__cuda_array_interface__["data"][1])
    except Exception:  # raised for dtypes the interface cannot say (bfloat16), and for tensors that track gradients
        return False


def as_cupy(x: Any, is_written: bool) -> Any:
    """Return a GPU array as CuPy's, over the same memory; None for all else, which `inspect` has words for."""
    cupy = sys.modules.get("cupy")
    gpu_type = cupy_ndarray()
    if cupy is None or gpu_type is None or type(x) is gpu_type:
        return None if gpu_type is None else x
    if isinstance(x, (np.ndarray, gpu_type)):
        return None
    try:
        if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) not in GPU_DEVICES:
            return None
        return None if is_written and _is_read_only(x) else _as_cupy(cupy, x)
    except Exception:  # whatever another library raises
        return None


def stand_in(name: str, x: Any, device: int) -> ArrayInfo:
    """Read the description of an array: anything with `shape` and `dtype`, `strides` in bytes where it has them."""
    if isinstance(x, np.ndarray):
        return inspect(name, x)._replace(device=device)
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        return inspect(name, x)
    try:
        shape = tuple(operator.index(length) for length in shape)
        dtype = np.dtype(dtype)
        strides = getattr(x, "strides", None)
        strides = contiguous_strides(shape, dtype.itemsize) if strides is None else tuple(map(operator.index, strides))
    except TypeError as error:
        raise TypeError(f"{name} is a stand-in that NumPy cannot read: {error}") from None
    if min(shape, default=0) < 0 or len(strides) != len(shape):
        raise ValueError(
            f"{name} is a stand-in with shape {shape} and strides {strides}, expected lengths >= 0, one stride each"
        )
    return ArrayInfo(None, shape, strides, DTYPE_NAMES.get(dtype) or str(dtype), 0, device, True)


def extent(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First and one-past-last byte address that the elements touch (equal for an empty array)."""
    if 0 in shape:
        return pointer, pointer
    if not strides or min(strides) >= 0:
        return pointer, pointer + sum(map(mul, shape, strides)) - sum(strides) + itemsize
    low = high = pointer
    for length, stride in zip(shape, strides, strict=True):
        if stride > 0:
            high += (length - 1) * stride
        else:
            low += (length - 1) * stride
    return low, high + itemsize


def share_memory(a: ArrayInfo, b: ArrayInfo) -> bool:
    """Whether two arrays have a byte in common (also without a GPU: only addresses are looked at)."""
    if a.device != b.device:
        return False
    a_low, a_high = extent(a.pointer, a.shape, a.strides, ITEMSIZE[a.dtype])
    b_low, b_high = extent(b.pointer, b.shape, b.strides, ITEMSIZE[b.dtype])
    if a_high <= b_low or b_high <= a_low:
        return False
    most: Any = 100_000  # NumPy's types know no limit but 0 and 1
    try:
        return np.shares_memory(_addresses(a), _addresses(b), max_work=most)
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements of one array share a byte (stride 0, or interleaved rows)."""
    reach = itemsize
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1:
            if stride < reach:
                break  # in another order, or shared
            reach += stride * (length - 1)
    else:
        return False
    reach = itemsize
    for stride, length in sorted((abs(stride), length) for stride, length in zip(strides, shape, strict=True)):
        if length > 1:
            if stride < reach:
                return 0 not in shape
            reach += stride * (length - 1)
    return False


class _Addresses:
    def __init__(self, info: ArrayInfo) -> None:
        dtype = np.dtype(f"V{ITEMSIZE[info.dtype]}")
        self.__array_interface__ = {
            "version": 3,
            "shape": info.shape,
            "strides": info.strides,
            "typestr": dtype.str,
            "data": (info.pointer, True),
        }


def _addresses(info: ArrayInfo) -> np.ndarray:
    """Return an array over the same addresses, never to be read: NumPy then solves the overlap exactly."""
    return np.asarray(_Addresses(info))
