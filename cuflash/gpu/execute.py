"""From a call to its `Launch`, which is remembered: the look-up, and what a call that is new has to go through.

A call that looks like an earlier one - same shapes, strides, dtypes, alignments and options - finds its launch in a
bounded cache and costs one look-up, one allocation per result and the launch itself. One that differs from an earlier
one in lengths, strides and addresses alone is planned without being checked, by what its kind has remembered. Any other
call goes the whole way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.axes import Axes
from ..plan.plan import make_plan
from ..problem.arrays import ArrayInfo, as_cupy, cupy_ndarray, overlaps_itself
from ..problem.kind import Kind
from ..problem.problem import ARRAYS, Problem, written_places
from ..settings import Settings, settings
from .arguments import Packer
from .launch import Launch, device_info
from .workspace import check_size

CACHE_SIZE = 4096
_launches: dict[Any, Launch] = {}
_calls: dict[Any, CallsOfKind] = {}

_Q, _K, _V, _K_NEW = map(ARRAYS.index, ("q", "k", "v", "k_new"))
_NO_POINTERS = (0,) * (len(ARRAYS) - 3)
_QKV = (0, 1, 2)
_WITHOUT_VALUES = "attention_lse"
_OF_CACHES = "attention_with_kv_cache"
"""Whose options end with the number of keys, where no array shows it."""


class CallsOfKind:
    """What calls share that differ in lengths, strides and addresses alone.

    Parameters
    ----------
    like : Problem
        Of any of them.
    given : sequence of int
        Places in `ARRAYS` of the arrays that are given.
    device_id : int
    chosen : Settings
    """

    def __init__(self, like: Problem, given: Sequence[int], device_id: int, chosen: Settings) -> None:
        self._kind = Kind(like, given)
        written = written_places(_K_NEW in given)
        self._written = [i for i, place in enumerate(given) if place in written]
        self._device_id = device_id
        self._chosen = chosen
        self._packers: dict[tuple[bool, int, Axes], Packer] = {}

    def launch_at(
        self, dtypes: Any, shapes: Any, strides: Any, pointers: list[int], num_keys: int | None
    ) -> Launch | None:
        """Return the launch of a call, given what its arrays are, None if it has to be checked.

        `num_keys` is that of a cache, where it is known.
        """
        for i in self._written:
            if overlaps_itself(shapes[i], strides[i], dtypes[i].itemsize):
                return None
        problem = self._kind.at(shapes, strides, pointers, num_keys)
        return None if problem is None else self.launch_of(problem)

    def launch_of(self, problem: Problem) -> Launch:
        """Return the launch of a problem."""
        plan = make_plan(problem, device_info(self._device_id), self._chosen)
        key = plan.num_splits > 1, plan.packed_heads, plan.batch_axes
        packer = self._packers.get(key)
        if packer is None:
            packer = self._packers[key] = Packer(problem, plan)
        return Launch(problem, plan, self._device_id, packer)


_found_gpu_type: type | None = None


def _gpu_type() -> type | None:
    """CuPy's array type, looked up until there is one."""
    global _found_gpu_type
    if _found_gpu_type is None:
        _found_gpu_type = cupy_ndarray()
    return _found_gpu_type


def find_on_gpu(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple[Any, ...]
) -> tuple[Any, Launch | None, list[int]]:
    """Look up the launch of an earlier call of the same form; see `dispatch.find`."""
    gpu_type = type(q)
    if v is None and options[0] == _WITHOUT_VALUES:
        v = k  # nobody reads what stands for them
    if gpu_type is not _gpu_type() or type(k) is not gpu_type or type(v) is not gpu_type:
        return _find_imported(q, k, v, others, options)
    q_data, k_data, v_data = q.data, k.data, v.data
    pointers = [q_data.ptr, k_data.ptr, v_data.ptr, *_NO_POINTERS]
    alignment = (pointers[0] & 15) << 8 | (pointers[1] & 15) << 4 | pointers[2] & 15
    places: tuple[int, ...] = _QKV
    devices: tuple[int, ...] = (q_data.device_id, k_data.device_id, v_data.device_id)
    dtypes: tuple[Any, ...] = (q.dtype, k.dtype, v.dtype)
    shapes: tuple[Any, ...] = (q.shape, k.shape, v.shape)
    strides: tuple[Any, ...] = (q.strides, k.strides, v.strides)
    if others is not None:
        for place, array in enumerate(others, 3):
            if array is None:
                continue
            if type(array) is not gpu_type:
                return _find_imported(q, k, v, others, options)
            data = array.data
            pointers[place] = pointer = data.ptr
            alignment = alignment << 4 | pointer & 15
            places += (place,)
            devices += (data.device_id,)
            dtypes += (array.dtype,)
            shapes += (array.shape,)
            strides += (array.strides,)
    key = options, settings(), places, devices, dtypes, shapes, strides, alignment
    try:
        launch = _launches.get(key)
    except (TypeError, ValueError):  # an option has no hash
        return None, None, pointers
    if launch is None:
        launch = _launch_of_known_kind(key, pointers)
    return key, launch, pointers


class _Addresses(list[int]):
    """Those of a call's arrays, and what they are the addresses of."""

    arrays: list[Any]


def _find_imported(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple[Any, ...]
) -> tuple[Any, Launch | None, list[int]]:
    """Look up a call with arrays of other libraries, as that with CuPy's over the same memory."""
    given = (q, k, v, *(others or ()))
    appends = len(given) > _K_NEW and given[_K_NEW] is not None
    written = written_places(appends)
    arrays = [None if x is None else as_cupy(x, place in written) for place, x in enumerate(given)]
    if any(array is None and (place < 3 or given[place] is not None) for place, array in enumerate(arrays)):
        return None, None, []
    key, launch, pointers = find_on_gpu(arrays[_Q], arrays[_K], arrays[_V], tuple(arrays[3:]) or None, options)
    addresses = _Addresses(pointers)
    addresses.arrays = arrays
    return key, launch, addresses


def _kind_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of a call's key its lengths do not change."""
    options, chosen, places, devices, dtypes, (q, k, v, *_), _, _ = key
    if options[0] == _OF_CACHES:
        options = (*options[:-1], options[-1] is None)
    fixed: tuple[Any, ...]
    if options[0] != "attention_varlen":
        # `[-2:][1:]` is the axis of features, and nothing for an array of one axis, which no call takes.
        fixed = q[:-2], k[:-2], v[:-2], q[-2:][1:], k[-2:][1:], v[-2:][1:]
    else:
        fixed = q[1:], k[1:], v[1:]
    return options, chosen, places, devices, dtypes, fixed


def _launch_of_known_kind(key: tuple[Any, ...], pointers: list[int]) -> Launch | None:
    """Plan a call that an earlier one differs from in lengths, strides and addresses alone; None if there is none."""
    calls = _calls.get(_kind_key(key))
    if calls is None:
        return None
    options, *_, dtypes, shapes, strides, _ = key
    launch = calls.launch_at(dtypes, shapes, strides, pointers, options[-1] if options[0] == _OF_CACHES else None)
    if launch is not None:
        _remember(_launches, key, launch)
    return launch


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= CACHE_SIZE:
        cache.clear()  # atomic, unlike removing the oldest entry while other threads add theirs
    cache[key] = value


def execute_on_gpu(problem: Problem, infos: dict[str, ArrayInfo], key: Any, out: Any, lse: Any) -> Any:
    """Compute a checked problem; `out` and `lse` are the caller's own objects, which are returned if given."""
    given = key[2] if key is not None else ()
    calls = CallsOfKind(problem, given, infos["q"].device, settings())
    launch = calls.launch_of(problem)
    check_size(infos, launch.plan.workspace)
    if key is not None:
        _remember(_launches, key, launch)
        _remember(_calls, _kind_key(key), calls)
    pointers = [infos[name].pointer if name in infos else 0 for name in ARRAYS]
    workspace = infos["workspace"].array if "workspace" in infos else None
    return launch.run(pointers, out, lse, workspace)
