"""From a plan to the results: allocates them, fills the argument struct, launches.

A call that looks like an earlier one - same shapes, strides, dtypes, alignments and options - finds its `Launch` in a
bounded cache and costs one look-up, one allocation per result and the launch itself. A call that differs from an
earlier one in its lengths alone (`Form`) is neither described nor planned again.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from ..plan.plan import MAX_GRID, Plan, make_plan, plan_other_lengths
from ..plan.splits import partial_results, result_axes
from ..plan.table import Device
from ..problem.arrays import DTYPES, ITEMSIZE, ArrayInfo, cupy_ndarray, extent, strides_like
from ..problem.checks import workspace_size
from ..problem.problem import Operand, Problem, result_rows
from ..settings import settings
from . import compile as compile_module
from .params import (
    POINTERS,
    POINTERS_SIZE,
    SIZE,
    pack_form,
    pack_other_lengths,
    pack_pointers_into,
    pack_problem_lengths,
)
from .workspace import Result, Split, allocate_with_workspace, check_size, split_of

CACHE_SIZE = 4096
_launches: dict[Any, Launch] = {}
_forms: dict[Any, Form] = {}

_NO_POINTERS = (0,) * (len(POINTERS) - 3)
_INFO_NAMES = {"query_offsets": "query_offset"}
"""Argument names of the struct's addresses, where they differ."""


class _Arguments:
    """Memory for one argument struct, and what CuPy needs to pass it by value. The driver copies it at the launch."""

    def __init__(self) -> None:
        from cupy.cuda.function import CPointer

        array = np.empty(SIZE, np.uint8)
        self.memory = array.data
        self.by_value = (CPointer(array.ctypes.data),)


_free_arguments: list[_Arguments] = []


class Form:
    """What launches share that differ in their lengths alone."""

    def __init__(self, problem: Problem, plan: Plan, device_id: int) -> None:
        self.problem = problem
        self.plan = plan
        self.device_id = device_id
        self.cupy = sys.modules["cupy"]
        self.get_device = self.cupy.cuda.runtime.getDevice
        self.function: Any = compile_module.kernel_function(plan, device_id) if plan.num_blocks else None
        self.block = (plan.tile.num_threads,)
        self.packed = pack_form(problem, plan)

    def launch(self, q: Any, k: Any, v: Any) -> Launch | None:
        """Plan a dense call of this form with other lengths; None where more than those would change.

        Parameters
        ----------
        q, k, v
            CuPy arrays without options beside them, of the dtypes, leading axes, heads and features of this form.
        """
        problem = self.problem
        q_strides, k_strides, v_strides = q.strides, k.strides, v.strides
        seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
        bits = 0
        for strides in (q_strides, k_strides, v_strides):
            for stride in strides[:-1]:
                bits |= stride
        itemsize = ITEMSIZE[problem.dtype]
        same_layout = bits & 15 == 0 and q_strides[-1] == k_strides[-1] == v_strides[-1] == itemsize
        if not same_layout or seqlen_k != v.shape[-2]:
            return None
        offset = seqlen_k - seqlen_q if problem.bottom_right else problem.query_offset
        plan = plan_other_lengths(problem, self.plan, device_info(self.device_id), seqlen_q, seqlen_k, offset)
        if plan is None or not 0 < plan.num_blocks <= MAX_GRID:
            return None
        rows = (*problem.batch, problem.num_heads_q, seqlen_q)
        out, lse = self._results(rows, q_strides)
        to_out, to_lse, split_strides, split = out, lse, (0, 0), None
        if plan.num_splits > 1:
            split = split_of(rows, problem, out, lse, plan, self.device_id)
            to_out, to_lse, split_strides = split.partial
        strides = (q_strides, k_strides, v_strides, to_out.strides, to_lse.strides if to_lse else ())
        lengths = pack_other_lengths(problem, plan, (seqlen_q, seqlen_k), offset, strides, split_strides)
        return Launch(self, plan, (((plan.num_blocks,), lengths + self.packed, None),), rows, seqlen_k, out, lse, split)

    def _results(self, rows: tuple[int, ...], like: tuple[int, ...]) -> tuple[Operand, Operand | None]:
        """Layout of new results for a query with the strides `like`."""
        problem = self.problem
        out_strides = strides_like((*rows, problem.head_dim_v), like, ITEMSIZE[problem.out_dtype])
        lse = None
        if problem.lse is not None:
            lse = Operand(problem.lse_dtype, strides_like(rows, like, ITEMSIZE[problem.lse_dtype]), 16)
        return Operand(problem.out_dtype, out_strides, 16), lse


Part = tuple[tuple[int], bytes, "tuple[int, ...] | None"]
"""One launch: its grid, the struct behind the addresses, and what to add to the addresses (None: nothing)."""


class Launch:
    """A planned and compiled call, ready for new addresses."""

    __slots__ = ("_extents", "_lse", "_out", "_parts", "_seqlens", "_split", "form", "plan")

    def __init__(
        self,
        form: Form,
        plan: Plan,
        parts: tuple[Part, ...],
        rows: tuple[int, ...],
        seqlen_k: int,
        out: Operand,
        lse: Operand | None,
        split: Split | None,
    ) -> None:
        self.form = form
        self.plan = plan
        self._parts = parts
        self._split = split
        self._seqlens = rows[-1] if form.problem.op == "attention" else rows[0], seqlen_k
        self._out = Result((*rows, form.problem.head_dim_v), out)
        self._lse = Result(rows, lse) if lse is not None else None
        self._extents: list[tuple[int, int]] | None = None

    def __str__(self) -> str:
        seqlen_q, seqlen_k = self._seqlens
        return f"{self.form.problem._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)} -> {self.plan}"

    def set_extents(self, infos: dict[str, ArrayInfo]) -> None:
        """Note how far each array reaches from its address, for `results_apart`."""
        self._extents = []
        for name in POINTERS:
            info = infos.get(_INFO_NAMES.get(name, name))
            itemsize = DTYPES[info.dtype].itemsize if info else 0
            self._extents.append(extent(0, info.shape, info.strides, itemsize) if info else (0, 0))

    def results_apart(self, pointers: list[int]) -> bool:
        """Whether given results certainly share no memory with another array of the call (False: look closer)."""
        spans = [(p + low, p + high) for p, (low, high) in zip(pointers, self._extents or (), strict=False)]
        for result in (3, 4):
            low, high = spans[result]
            if low < high and any(i != result and a < high and low < b for i, (a, b) in enumerate(spans)):
                return False
        return True

    def takes(self, workspace: Any, pointers: list[int]) -> bool:
        """Whether a given workspace certainly serves the call (False: look closer)."""
        gpu_type: Any = _gpu_type()
        if self._extents is None or type(workspace) is not gpu_type or workspace.dtype != np.uint8:
            return False
        data, size = workspace.data, workspace.size
        if workspace.ndim != 1 or workspace.strides != (1,) or data.device_id != self.form.device_id:
            return False
        low, high = data.ptr, data.ptr + size
        apart = all(
            p + end <= low or high <= p + begin or begin == end
            for p, (begin, end) in zip(pointers, self._extents, strict=True)
        )
        return apart and workspace_size(low, size) >= self.plan.workspace

    def run(self, pointers: list[int], out: Any, lse: Any, workspace: Any = None) -> Any:
        """Run on the current stream of the arrays' device; `pointers` are the addresses in the order of the struct."""
        form = self.form
        if form.get_device() != form.device_id:
            with form.cupy.cuda.Device(form.device_id):
                return self.run(pointers, out, lse, workspace)
        if settings().log:
            print(f"cuflash: {self}", file=sys.stderr)
        if self._split is not None:
            return self._run_split(self._split, pointers, out, lse, workspace)
        if out is None:
            out = self._out.allocate(form.cupy)
            pointers[3] = out.data.ptr
        if self._lse is not None and lse is None:
            lse = self._lse.allocate(form.cupy)
            pointers[4] = lse.data.ptr
        self._start(pointers)
        return out if self._lse is None else (out, lse)

    def _run_split(self, split: Split, pointers: list[int], out: Any, lse: Any, workspace: Any) -> Any:
        """Write partial results into a workspace, then join them."""
        cupy = self.form.cupy
        allocates = out is None
        out, workspace, address = allocate_with_workspace(cupy, self._out, out, split.size, workspace)
        if allocates:
            pointers[3] = out.data.ptr
        if self._lse is not None and lse is None:
            lse = self._lse.allocate(cupy)
            pointers[4] = lse.data.ptr
        result, pointers[3:5] = pointers[3:5], (address, address + split.lse_offset)
        self._start(pointers)
        split.combine(address, *result)
        return out if self._lse is None else (out, lse)

    def _start(self, pointers: list[int]) -> None:
        form = self.form
        # A buffer of this call's own while it lasts: other threads, and calls that interrupt this one, take another.
        try:
            arguments = _free_arguments.pop()
        except IndexError:
            arguments = _Arguments()
        for grid, packed, offsets in self._parts:
            at = pointers if offsets is None else [p + o if p else 0 for p, o in zip(pointers, offsets, strict=True)]
            pack_pointers_into(arguments.memory, 0, *at)
            arguments.memory[POINTERS_SIZE:] = packed
            form.function(grid, form.block, arguments.by_value, form.plan.shared_memory)
        _free_arguments.append(arguments)


def _parts(form: Form) -> tuple[Part, ...]:
    """Launches that a plan needs: usually one, more beyond four leading axes or the largest grid."""
    problem, plan = form.problem, form.plan
    if plan.num_splits > 1:
        problem = partial_results(problem)
    parts: list[Part] = []
    for index in product(*(range(length) for _, length in plan.outer_axes)):
        offsets = None
        if index:
            offsets = tuple(
                sum(i * operand.strides[axis] for i, (axis, _) in zip(index, plan.outer_axes, strict=True))
                if operand
                else 0
                for operand in problem.operands
            )
        for first_block in range(0, plan.num_blocks, MAX_GRID):
            grid = (min(MAX_GRID, plan.num_blocks - first_block),)
            parts.append((grid, pack_problem_lengths(problem, plan, first_block) + form.packed, offsets))
    return tuple(parts)


_found_gpu_type: type | None = None


def _gpu_type() -> type | None:
    """CuPy's array type, looked up until there is one."""
    global _found_gpu_type
    if _found_gpu_type is None:
        _found_gpu_type = cupy_ndarray()
    return _found_gpu_type


@lru_cache(maxsize=64)
def device_info(device_id: int) -> Device:
    """Read a GPU's properties from the driver."""
    import cupy

    device = cupy.cuda.Device(device_id)
    attributes = device.attributes
    capability = int(device.compute_capability)
    memory = attributes["MaxSharedMemoryPerBlockOptin"] or attributes["MaxSharedMemoryPerBlock"]
    return Device(capability, memory, attributes["MultiProcessorCount"])


def find_on_gpu(
    q: Any, k: Any, v: Any, others: tuple[Any, ...] | None, options: tuple
) -> tuple[Any, Launch | None, list[int]]:
    """Look up the launch of an earlier call of the same form; see `dispatch.find`."""
    gpu_type = type(q)
    if gpu_type is not _gpu_type() or type(k) is not gpu_type or type(v) is not gpu_type:
        return None, None, []
    q_data, k_data, v_data = q.data, k.data, v.data
    pointers = [q_data.ptr, k_data.ptr, v_data.ptr]
    alignment = (pointers[0] & 15) << 8 | (pointers[1] & 15) << 4 | pointers[2] & 15
    devices = q_data.device_id, k_data.device_id, v_data.device_id
    key: tuple[Any, ...] = (
        options, settings(), alignment, devices, q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape,
        v.strides, v.dtype
    )  # fmt: skip
    if others is None:
        pointers += _NO_POINTERS
    else:
        parts: list[Any] = []
        for array in others:
            if array is None:
                parts.append(None)
                pointers.append(0)
            elif type(array) is gpu_type:
                pointer = array.data.ptr
                pointers.append(pointer)
                parts += (array.shape, array.strides, array.dtype, pointer & 15, array.data.device_id)
            else:
                return None, None, []
        key += tuple(parts)
    try:
        launch = _launches.get(key)
    except TypeError:
        return None, None, pointers
    if launch is None and others is None:
        form_key = _form_key(key)
        form = _forms.get(form_key) if form_key is not None else None
        launch = form.launch(q, k, v) if form is not None else None
        if launch is not None:
            _remember(_launches, key, launch)
    return key, launch, pointers


def _form_key(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Reduce the key of a call without further arrays to what does not change with its lengths."""
    options, chosen, alignment, devices, q_shape, _, q_dtype, k_shape, _, k_dtype, v_shape, _, v_dtype = key
    if alignment or len(q_shape) < 3 or not len(q_shape) == len(k_shape) == len(v_shape):
        return None
    dtypes = q_dtype, k_dtype, v_dtype
    shapes = q_shape[:-2], q_shape[-1], k_shape[:-2], k_shape[-1], v_shape[:-2], v_shape[-1]
    return options, chosen, devices, dtypes, shapes


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= CACHE_SIZE:
        cache.clear()  # atomic, unlike removing the oldest entry while other threads add theirs
    cache[key] = value


def execute_on_gpu(problem: Problem, infos: dict[str, ArrayInfo], key: Any, out: Any, lse: Any) -> Any:
    """Compute a checked problem; `out` and `lse` are the caller's own objects, which are returned if given."""
    device_id = infos["q"].device
    plan = make_plan(problem, device_info(device_id), settings())
    check_size(infos, plan.workspace)
    form = Form(problem, plan, device_id)
    split = None
    if plan.num_splits > 1:
        split = split_of(result_axes(problem), problem, problem.out, problem.lse, plan, device_id)
    rows = result_rows(problem)
    launch = Launch(form, plan, _parts(form), rows, problem.seqlen_k, problem.out, problem.lse, split)
    if "out" in infos or "lse" in infos or "workspace" in infos:
        launch.set_extents(infos)
    if key is not None:
        _remember(_launches, key, launch)
        form_key = _form_key(key) if len(infos) == 3 and _varies_by_length(problem, plan) else None
        if form_key is not None:
            _remember(_forms, form_key, form)
    pointers = []
    for name in POINTERS:
        info = infos.get(_INFO_NAMES.get(name, name))
        pointers.append(info.pointer if info else 0)
    workspace = infos["workspace"].array if "workspace" in infos else None
    return launch.run(pointers, out, lse, workspace)


def _varies_by_length(problem: Problem, plan: Plan) -> bool:
    """Whether `Form.launch` may stand in for a plan: dense arrays with the same leading axes, each one of the kernel's.

    They must have the alignment that follows from the features alone: other lengths then have it too.
    """
    if problem.op != "attention" or problem.is_2d or plan.num_blocks == 0 or len(plan.batch_axes) != len(problem.batch):
        return False
    same_axes = all(
        0 not in operand.strides and operand.alignment == 16 for operand in (problem.q, problem.k, problem.v)
    )
    itemsize, out_itemsize = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    row_bytes = problem.head_dim * itemsize | problem.head_dim_v * itemsize | problem.head_dim_v * out_itemsize
    return same_axes and dict(plan.macros)["ALIGNMENT"] == (itemsize if row_bytes & 15 else 16)
