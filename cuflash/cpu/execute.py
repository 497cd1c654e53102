"""NumPy arrays: from a checked problem to the CPU back end, results allocated as `numpy.empty_like` would."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from ..log import DEBUG, Shapes, is_enabled, log_call, log_plan
from ..plan.table import CPU_KERNEL
from ..problem.arrays import DTYPES, ArrayInfo, contiguous_strides, shapes_given
from ..problem.gated import GatedProblem
from ..problem.problem import ARRAYS, Problem, array_shapes, result_rows, shapes_of
from ..settings import AUTOMATIC, Settings, settings
from . import attention as cpu
from .blocks import ARRAYS as SEQUENCE_ARRAYS
from .blocks import Sequence
from .cache import attention_with_kv_cache

CACHE_SIZE = 1024
REMEMBERED = "attention", "attention_lse"
"""Functions whose calls are looked up; of others what arrays hold decides how the work is cut."""
_VALUES = slice(2, 4)
"""Places of v and out among the arrays of a call."""
_calls: dict[Any, HostCall] = {}


class HostCall:
    """A checked call of `attention` or `attention_lse`, ready for other arrays of the same shapes, strides, dtypes."""

    def __init__(self, problem: Problem, arrays: dict[str, np.ndarray | None], sequence: Sequence) -> None:
        self._problem = problem
        self._task = cpu.Task.of(problem, sequence)
        self._rows = result_rows(problem)
        self._offset = sequence.offset
        shape, dtype = (*self._rows, problem.traits.head_dim_v), DTYPES[problem.traits.out_dtype]
        # Nearly always new results have nothing special, and there is no other one.
        out = problem.strides.out if problem.strides.lse is None else None
        is_usual = out is not None and out[-len(shape) :] == contiguous_strides(shape, dtype.itemsize)
        self._new_out = (shape, dtype) if is_usual else None
        # Place, shape as broadcast and shape in the sequence of each array that there is.
        self._forms = [
            (place, x.shape, getattr(sequence, name).shape)
            for place, name in enumerate(SEQUENCE_ARRAYS)
            if (x := arrays[name]) is not None
        ]

    def takes(self, workspace: Any, arrays: tuple[Any, ...]) -> bool:
        """Whether a given workspace certainly serves the call (False: look closer)."""
        return False

    def results_apart(self, arrays: tuple[Any, ...]) -> bool:
        """Whether given results can be written and share no memory with another array (False: look closer)."""
        given = [x for x in arrays if x is not None]
        results = [x for x in arrays[3:5] if x is not None]
        # Each result is one of those given: it shares memory with itself.
        return all(x.flags.writeable and sum(np.may_share_memory(x, y) for y in given) == 1 for x in results)

    def run(self, arrays: tuple[Any, ...], out: Any, lse: Any, workspace: Any = None) -> Any:
        """Compute; `arrays` are q, k, v and the other ones of `dense.attention`."""
        problem, chosen = self._problem, settings()
        if chosen != AUTOMATIC or is_enabled(DEBUG):
            announce(problem, chosen, lambda: array_shapes(problem))
        if out is None and lse is None and self._new_out is not None:
            out = np.empty(*self._new_out)
        else:
            out, lse = results_for(problem, self._rows, out, lse)
        given = [*arrays[:3], out, lse, *arrays[5:9]]  # a call without options names none
        if not problem.traits.has_values:
            given[_VALUES] = _without_features(arrays[1], lse)
        views: list[Any] = [None] * len(SEQUENCE_ARRAYS)
        for place, full, shape in self._forms:
            views[place] = _broadcast(given[place], full).reshape(shape)
        cpu.compute(self._task, [Sequence(*views, self._offset)])  # type: ignore[call-arg]
        return _returned(problem, out, lse)


def find_on_host(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple[Any, ...]
) -> tuple[Any, HostCall | None, tuple[Any, ...]]:
    """Look up an earlier call with NumPy arrays of the same form; see `dispatch.find`."""
    if options[0] not in REMEMBERED:
        return None, None, ()
    arrays = (q, k, v) if others is None else (q, k, v, *others)
    parts: list[Any] = [options]
    for x in arrays:
        if type(x) is np.ndarray:
            parts += (x.shape, x.strides, x.dtype)
        elif x is None:
            parts.append(None)
        else:
            return None, None, ()
    key = tuple(parts)
    try:
        return key, _calls.get(key), arrays
    except (TypeError, ValueError):  # an option has no hash
        return None, None, ()


def execute_on_host(
    problem: Problem, infos: dict[str, ArrayInfo], key: Any, chosen: Settings, out: Any, lse: Any
) -> Any:
    """Compute a problem of NumPy arrays; `out` and `lse` are the caller's own objects, which are returned if given."""
    announce(problem, chosen, lambda: shapes_given(infos))
    rows, traits = result_rows(problem), problem.traits
    arrays = inputs_of(problem, infos)
    new_out, new_lse = results_for(problem, rows, out, lse)
    # What is written goes past the methods of a caller's subclass of ndarray.
    arrays["out"] = new_out if out is None else infos["out"].array
    arrays["lse"] = new_lse if lse is None else infos["lse"].array
    out, lse = new_out, new_lse
    if not traits.has_values:
        arrays["v"], arrays["out"] = _without_features(arrays["k"], arrays["lse"])
    if problem.is_2d:
        arrays.update((name, x[None]) for name in ("out", "lse") if (x := arrays[name]) is not None)
    if problem.traits.is_varlen:
        cpu.attention_varlen(problem, arrays)
        return _returned(problem, out, lse)
    if problem.cache is not None:
        attention_with_kv_cache(problem, arrays)
        return _returned(problem, out, lse)
    sequences = cpu.attention(problem, arrays)
    # What an array of offsets holds decides how the work is cut.
    if key is not None and problem.strides.query_offset is None and sequences:
        if len(_calls) >= CACHE_SIZE:
            _calls.clear()  # atomic, unlike removing the oldest entry while other threads add theirs
        _calls[key] = HostCall(problem, arrays, sequences[0])
    return _returned(problem, out, lse)


def announce(problem: Problem | GatedProblem, chosen: Settings, shapes: Callable[[], Shapes]) -> None:
    """Check what `options()` chose for a call and log it, before anything is computed."""
    check_settings(chosen)
    log_plan(problem, CPU_KERNEL)
    if chosen.log or is_enabled(DEBUG):
        log_call(problem, CPU_KERNEL, shapes())


def results_for(problem: Problem, rows: tuple[int, ...], out: Any, lse: Any) -> tuple[Any, Any]:
    """Allocate the results that the caller has not given."""
    traits, strides = problem.traits, problem.strides
    if strides.out is not None and out is None:
        out = allocate((*rows, traits.head_dim_v), traits.out_dtype, strides.out)
    if strides.lse is not None and lse is None:
        lse = allocate(rows, traits.lse_dtype, strides.lse)
    return out, lse


def _without_features(k: Any, lse: Any) -> tuple[Any, Any]:
    """Values and output of a call that has none: of no features, so that what NumPy does with them is nothing."""
    return k[..., :0], lse[..., np.newaxis][..., :0]


def _returned(problem: Problem, out: Any, lse: Any) -> Any:
    if problem.strides.lse is None:
        return out
    return (out, lse) if problem.traits.has_values else lse


def check_settings(chosen: Settings) -> None:
    """Raise ValueError if `options(kernel=..., tile=...)` asks for what the NumPy back end is not."""
    if chosen.kernel not in ("", CPU_KERNEL):
        raise ValueError(f"kernel {chosen.kernel!r} cannot serve this call: it needs GPU arrays, these are NumPy's")
    if chosen.tile:
        raise ValueError(f"tile {chosen.tile!r} cannot serve this call: the NumPy back end has no choice of tile")


def allocate(shape: tuple[int, ...], name: str, strides: tuple[int, ...]) -> np.ndarray:
    """Return a new array of a type with a given name; strides may begin with those of axes that it has not."""
    dtype = DTYPES[name]
    new = np.empty(shape, dtype)
    strides = strides[len(strides) - len(shape) :]
    return new if new.strides == strides else np.ndarray(shape, dtype, np.empty(max(1, prod(shape)), dtype), 0, strides)


def inputs_of(problem: Problem, infos: dict[str, ArrayInfo]) -> dict[str, np.ndarray | None]:
    """Views of the inputs, broadcast to the axes of the problem; None for options that the call has not."""
    arrays: dict[str, np.ndarray | None] = dict.fromkeys(ARRAYS)
    for name, shape in zip(ARRAYS, shapes_of(problem), strict=True):
        if name in infos and name not in ("out", "lse"):
            arrays[name] = _broadcast(infos[name].array, shape)
    return arrays


def _broadcast(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast an array that may have axes of length 1 less, whose strides stay what they are."""
    if x.shape == shape:
        return x
    return x.reshape(shape) if x.size == prod(shape) else np.broadcast_to(x, shape)
