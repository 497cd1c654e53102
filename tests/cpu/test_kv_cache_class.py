"""`KVCache`: what it keeps against arrays that are kept one by one, and whose its pages are."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import cache_memory
from cuflash.problem import pages

LAYERS, SLOTS, HEADS, DIM, DIM_V = 2, 4, 2, 8, 5


def make(page_size: int | None, **options: Any) -> cuflash.KVCache:
    """Memory that nothing was written to is NaN."""
    given = {"head_dim_v": DIM_V, "num_layers": LAYERS, "page_size": page_size, "dtype": np.float32, **options}
    cache = cuflash.KVCache(SLOTS, HEADS, DIM, given.pop("capacity", 40), **given)
    for x in (*cache.keys, *cache.values):
        x[...] = np.nan
    return cache


class Model:
    """Keys and values of each layer and slot as arrays of their own."""

    def __init__(self) -> None:
        self.kept = [[np.zeros((HEADS, 0, dim), np.float32) for _ in range(SLOTS)] for dim in (DIM, DIM_V) * LAYERS]

    def append(self, layer: int, slot: int, k: np.ndarray, v: np.ndarray) -> None:
        for place, x in ((2 * layer, k), (2 * layer + 1, v)):
            self.kept[place][slot] = np.concatenate([self.kept[place][slot], x], axis=1)

    def length(self, slot: int) -> int:
        return int(self.kept[0][slot].shape[1])

    def fork(self, source: int, target: int) -> None:
        for of_layer in self.kept:
            of_layer[target] = of_layer[source].copy()

    def truncate(self, slot: int, length: int) -> None:
        for of_layer in self.kept:
            of_layer[slot] = of_layer[slot][:, :length]


def step(cache: cuflash.KVCache, model: Model, slots: Any, numbers: list[int], num_new: int, rng: Any) -> None:
    """Append to both, and compare what all layers say."""
    for layer in range(LAYERS):
        q = rng.standard_normal((len(numbers), 4, max(num_new, 1), DIM), dtype=np.float32)
        k, v = (rng.standard_normal((len(numbers), HEADS, num_new, n), dtype=np.float32) for n in (DIM, DIM_V))
        new = (k, v) if num_new else (None, None)
        out = cache.attention(q, *new, layer=layer, slots=slots)
        for b, slot in enumerate(numbers):
            model.append(layer, slot, k[b], v[b])
            keys, values = model.kept[2 * layer][slot], model.kept[2 * layer + 1][slot]
            expected = cuflash.attention(q[b], keys, values, causal=True)
            np.testing.assert_allclose(out[b], expected, rtol=1e-5, atol=1e-6)
    cache.advance(num_new, slots)


def assert_accounts(cache: cuflash.KVCache, model: Model, page_size: int | None) -> None:
    assert cache.lengths.tolist() == list(cache.num_keys) == [model.length(slot) for slot in range(SLOTS)]
    if page_size is None:
        assert cache.page_table is None and cache.num_free_pages is None
        return
    table = cache.page_table
    pages = table[table >= 0]
    assert cache.num_free_pages == len(cache.keys[0]) - len(set(pages.tolist()))
    for slot in range(SLOTS):
        needed = -(-model.length(slot) // page_size)
        assert (table[slot, :needed] >= 0).all() and len(set(table[slot, :needed].tolist())) == needed


@pytest.mark.parametrize("page_size", [None, 1, 4, 16, 40])
def test_against_a_model(page_size: int | None) -> None:
    rng = np.random.default_rng(0 if page_size is None else page_size)
    cache, model = make(page_size, num_pages=None if page_size is None else -(-45 // page_size)), Model()
    arrays = cache.lengths, cache.page_table
    refused = 0
    for _ in range(250):
        action = rng.integers(10)
        slot = int(rng.integers(SLOTS))
        try:
            if action < 6:
                first, last = sorted(rng.integers(0, SLOTS + 1, 2).tolist())
                numbers = list(range(first, last))
                slots: Any = slice(first, last)
                if page_size is not None and rng.integers(2):
                    numbers = rng.permutation(SLOTS)[: len(numbers)].tolist()
                    slots = numbers
                num_new = int(rng.choice([0, 1, 1, 2, 7]))
                if any(model.length(x) + num_new > 40 for x in numbers):
                    continue
                cache.reserve(num_new, slots)  # first, as what is refused later would leave layers apart
                step(cache, model, slots, numbers, num_new, rng)
            elif action < 8:
                targets = [x for x in range(SLOTS) if x != slot and rng.integers(2)]
                cache.fork(slot, targets)
                for target in targets:
                    model.fork(slot, target)
            elif action == 8:
                length = int(rng.integers(20))
                cache.truncate(length, slot)
                model.truncate(slot, length)
            else:
                cache.free(slot)
                model.truncate(slot, 0)
        except ValueError as error:
            assert page_size is not None and "pages" in str(error)
            refused += 1
        assert_accounts(cache, model, page_size)
    assert page_size is None or refused > 0
    assert cache.lengths is arrays[0] and cache.page_table is arrays[1]
    for array in arrays:
        if array is not None:
            with pytest.raises(ValueError, match="read-only"):
                array += 1
    cache.free()
    assert not cache.lengths.any() and cache.num_free_pages in (None, len(cache.keys[0]))


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    rng = np.random.default_rng(0)
    cache, model = make(4), Model()
    step(cache, model, 0, [0], 8, rng)
    cache.fork(0, [1, 2])
    for target in (1, 2):
        model.fork(0, target)
    assert cache.num_free_pages == 40 - 2
    cache.truncate(6, 1)  # the page that the others share is partly filled now
    model.truncate(1, 6)
    step(cache, model, 1, [1], 1, rng)
    assert cache.num_free_pages == 40 - 3
    step(cache, model, None, [0, 1, 2, 3], 3, rng)
    for slot in range(3):
        step(cache, model, slot, [slot], 0, rng)


def test_pages_and_no_pages_give_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    caches = [make(page_size) for page_size in (None, 3, 16)]
    for num_new in (7, 1, 1, 5):
        q, k = (rng.standard_normal((SLOTS, n, num_new, DIM), dtype=np.float32) for n in (4, HEADS))
        v = rng.standard_normal((SLOTS, HEADS, num_new, DIM_V), dtype=np.float32)
        outs = [cache.attention(q, k, v, softcap=3.0) for cache in caches]
        assert outs[0].tobytes() == outs[1].tobytes() == outs[2].tobytes()
        for cache in caches:
            cache.advance(num_new)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_goes_on_by_itself(copied: Callable[[Any], Any], page_size: int | None) -> None:
    rng = np.random.default_rng(0)
    cache, model = make(page_size), Model()
    step(cache, model, None, [0, 1, 2, 3], 6, rng)
    other, other_model = copied(cache), copy.deepcopy(model)
    assert repr(other) == repr(cache)
    other.free(1)
    other_model.truncate(1, 0)
    step(other, other_model, slice(0, 2), [0, 1], 3, rng)
    step(cache, model, slice(0, 3), [0, 1, 2], 2, rng)
    for held, expected in ((cache, model), (other, other_model)):
        assert np.asarray(held.lengths).tolist() == [expected.length(slot) for slot in range(SLOTS)]
        assert_accounts(held, expected, page_size)


@pytest.mark.parametrize("page_size", [None, 4])
def test_slices_of_any_step(page_size: int | None) -> None:
    rng = np.random.default_rng(0)
    cache, model = make(page_size), Model()
    for slot in range(SLOTS):
        step(cache, model, slot, [slot], slot + 1, rng)
    for part in (slice(None, None, -1), slice(None, None, 2), slice(-1, None), slice(2, 0, -1), slice(-9, None, -1)):
        step(cache, model, part, list(range(SLOTS))[part], 1, rng)
    assert cache.lengths.tolist() == [model.length(slot) for slot in range(SLOTS)] == [3, 4, 6, 6]


class DeviceArray(np.ndarray):
    """An array that the host must not look into."""

    device: AbstractContextManager[None] = nullcontext()

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise AssertionError("the host reads an array of the device")

    def __getitem__(self, at: Any) -> Any:
        x = super().__getitem__(at)
        return x if isinstance(x, DeviceArray) else self._refuse()

    __bool__ = __int__ = __index__ = __float__ = __iter__ = item = tolist = tobytes = _refuse  # type: ignore[assignment]
    astype = copy = all = any = max = min = sum = __array_function__ = _refuse  # type: ignore[assignment]


def device_module() -> ModuleType:
    """What the cache may use of an array library."""
    module = ModuleType("cupy")
    for name in ("empty", "zeros", "asarray"):
        make_array = getattr(np, name)
        # `asarray` of a host's array is a copy on a device.
        setattr(module, name, lambda *args, f=make_array: np.array(f(*args)).view(DeviceArray))
    return module


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_memory, "why_no_gpu", lambda: "no CUDA driver")
    with pytest.raises(RuntimeError, match="xp is cupy: no CUDA driver"):
        make(None, xp=device_module())


@pytest.mark.parametrize("page_size", [None, 4])
def test_the_host_reads_nothing_back_and_arrays_stay_where_they_are(
    page_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_memory, "why_no_gpu", lambda: "")
    rng = np.random.default_rng(0)
    cache, model = make(page_size, xp=device_module()), Model()
    arrays = [*cache.keys, *cache.values, cache.lengths, *([] if page_size is None else [cache.page_table])]
    assert all(type(x) is DeviceArray for x in arrays)
    addresses = [x.ctypes.data for x in arrays]
    step(cache, model, None, [0, 1, 2, 3], 6, rng)
    cache.fork(0, [2, 3])
    for target in (2, 3):
        model.fork(0, target)
    cache.truncate(3, slice(2, 4))
    for target in (2, 3):
        model.truncate(target, 3)
    cache.free(1)
    model.truncate(1, 0)
    cache.reserve(5, [3, 0])
    step(cache, model, slice(0, 3), [0, 1, 2], 2, rng)
    if page_size is not None:
        step(cache, model, [3, 0], [3, 0], 2, rng)
    repr(cache)
    arrays = [*cache.keys, *cache.values, cache.lengths, *([] if page_size is None else [cache.page_table])]
    assert [x.ctypes.data for x in arrays] == addresses
    assert np.asarray(cache.lengths).tolist() == [model.length(slot) for slot in range(SLOTS)]


def test_the_table_is_written_only_when_it_changes() -> None:
    cache = make(4)
    q, k, v = (np.ones((SLOTS, n, 1, d), np.float32) for n, d in ((4, DIM), (HEADS, DIM), (HEADS, DIM_V)))
    written = []

    class Table(np.ndarray):
        def __setitem__(self, at: Any, x: Any) -> None:
            written.append(at)
            super().__setitem__(at, x)

    cache._memory._written_table = cache._memory._written_table.view(Table)
    for token in range(8):
        for layer in range(LAYERS):
            cache.attention(q, k, v, layer=layer)
        cache.advance(1)
        assert len(written) == 1 + token // 4
    assert written[1] == (slice(0, 4), slice(1, 2))


def test_a_refused_call_leaves_a_shared_page_shared() -> None:
    rng = np.random.default_rng(0)
    cache, model = make(4), Model()
    step(cache, model, 0, [0], 8, rng)
    cache.fork(0, 1)
    model.fork(0, 1)
    cache.truncate(6, 1)
    model.truncate(1, 6)
    before, free = cache.page_table.copy(), cache.num_free_pages
    q, k, v = (np.ones((1, n, 5, d), np.float32) for n, d in ((4, DIM), (HEADS, DIM), (HEADS, DIM_V)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'sofcap'"):
        cache.attention(q, k, v, slots=1, sofcap=3.0)
    assert (cache.page_table == before).all() and cache.num_free_pages == free
    for slot in (0, 1):
        step(cache, model, slot, [slot], 0, rng)
    assert cache.num_free_pages == free, "what is only read is not copied"
    cache.free(1)
    assert cache.num_free_pages == free
    cache.fork(0, 1)
    model.fork(0, 1)
    cache.free(0)
    assert cache.num_free_pages == free
    model.truncate(0, 0)
    for slot in (0, 1):
        step(cache, model, slot, [slot], 3, rng)


def test_pages_of_the_targets_are_enough_for_a_fork() -> None:
    rng = np.random.default_rng(0)
    cache, model = make(4, num_pages=2), Model()
    for slot in (0, 1):
        step(cache, model, slot, [slot], 3, rng)
    cache.fork(0, 1)
    model.fork(0, 1)
    step(cache, model, [1, 0], [1, 0], 1, rng)
    assert cache.num_free_pages == 0


def test_new_pages_reach_slots_that_were_looked_at_before() -> None:
    rng = np.random.default_rng(0)
    cache, model = make(4), Model()
    for _ in range(2):
        step(cache, model, [2, 0], [2, 0], 0, rng)
        step(cache, model, [2, 0], [2, 0], 4, rng)


def test_the_last_user_of_a_page_keeps_it() -> None:
    rng = np.random.default_rng(0)
    cache, model = make(4, num_pages=3), Model()
    step(cache, model, 0, [0], 8, rng)
    cache.fork(0, 1)
    model.fork(0, 1)
    cache.truncate(7)
    for slot in (0, 1):
        model.truncate(slot, 7)
    step(cache, model, [0, 1], [0, 1], 1, rng)  # one copy, for which one page is enough
    assert cache.num_free_pages == 0
    cache.free(0)
    assert cache.num_free_pages == 1
    model.truncate(0, 0)
    step(cache, model, 1, [1], 0, rng)


def test_what_is_refused_changes_nothing() -> None:
    cache = make(4, num_pages=3)
    q, k, v = (np.ones((1, n, 5, d), np.float32) for n, d in ((4, DIM), (HEADS, DIM), (HEADS, DIM_V)))
    with pytest.raises(ValueError, match="v_new has shape"):
        cache.attention(q, k, v[..., :2], slots=0)
    with pytest.raises(ValueError, match=r"softcap is 0"):
        cache.attention(q, k, v, slots=0, softcap=0)
    assert cache.num_free_pages == 3 and (cache.page_table == -1).all() and np.isnan(cache.keys[0]).all()
    cache.attention(q, k, v, slots=0)
    cache.advance(5, 0)
    with pytest.raises(ValueError, match=re.escape("k_new has 5 keys for each of 1 slots, which need 2 more pages")):
        cache.attention(q, k, v, slots=1)
    with pytest.raises(ValueError, match="num_new is 9 but slot 0 has pages for 3 further keys"):
        cache.advance(9, 0)
    with pytest.raises(ValueError, match="slot 0 has 5 of 40, expected at most 35"):
        cache.reserve(36, 0)
    with pytest.raises(ValueError, match=r"targets has 2 slots, each with a page of its own, but only 1 of 3"):
        cache.fork(0, [1, 2])
    assert cache.num_free_pages == 1 and cache.lengths.tolist() == [5, 0, 0, 0]
    assert repr(cache).startswith(
        "KVCache(4 slots, 2 layers, 2 heads, head_dim 8, head_dim_v 5, float32, capacity 40, "
    )
    assert "pages of 4: 2 used, 1 free" in repr(cache)


class BoolOfTorch:
    """As `torch.tensor(True)`, which is 1 where an int is asked for."""

    dtype = "torch.bool"

    def __index__(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "tensor(True)"


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda c: cuflash.KVCache(0, 1, 8, 8), ValueError, "num_slots is 0, expected"),
    (lambda c: cuflash.KVCache(1, 1, 513, 8), ValueError, "head_dim is 513, expected 1 to 512"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8.0), TypeError, "capacity is 8.0 (float), expected an int"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8, num_pages=3), ValueError, "num_pages is 3 but page_size is None"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8, dtype=int), TypeError, "dtype is int64, expected float16"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8, dtype=None), TypeError, "dtype is None, expected float16"),
    (lambda c: cuflash.KVCache(1, 1, 8, BoolOfTorch()), TypeError, "capacity is tensor(True) (bool), expected an int"),
    (
        lambda c: cuflash.KVCache(1, 1, 8, 8, dtype=np.float32(1)),
        TypeError,
        f"dtype is {np.float32(1.0)!r}, expected float16",
    ),
    (lambda c: cuflash.KVCache(10**5000, 1, 8, 8), ValueError, "num_slots is an int of 16610 bits, expected an int"),
    (lambda c: c.attention(np.float32), TypeError, "q is the class float32, expected a NumPy"),
    (lambda c: c.attention(np), TypeError, "q is a module, expected a NumPy"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8, block_size=3), TypeError, "'block_size'; cuflash calls it page_size"),
    (lambda c: cuflash.KVCache(1, 1, max_seq_len=8), TypeError, "'max_seq_len'; cuflash calls it capacity"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8, layers=3), TypeError, "'layers'; did you mean num_layers?"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8, 8), TypeError, "takes 4 positional arguments (num_slots, num_heads_kv,"),
    (lambda c: cuflash.KVCache(1, 1, 8), TypeError, "missing 1 required positional argument: 'capacity'"),
    (lambda c: cuflash.KVCache(1, 1, 8, 8, xp=np.linalg), TypeError, "expected the module numpy or cupy"),
    (lambda c: c.attention(np.ones((4, 4, 1, 8), "f"), layer=2), ValueError, "layer is 2, expected 0 to 1"),
    (lambda c: c.attention(np.ones((3, 4, 1, 8), "f")), ValueError, "q has batch 3, expected 4"),
    (lambda c: c.attention(np.ones((2, 4, 1, 8), "f"), slots=[0, 1]), ValueError, "slots is a list, expected None"),
    (lambda c: c.attention(np.ones((4, 4, 1, 8), "f"), seqlens_k=3), TypeError, "'seqlens_k'; keys, values, len"),
    *(
        (lambda c, x={name: 3}: c.attention(np.ones((4, 4, 1, 8), "f"), **x), TypeError, f"{name!r}; keys, values, len")
        for name in ("cache_position", "kv_cache", "past_key_values", "seq_lens")
    ),
    (
        lambda c: c.attention(np.ones((4, 4, 1, DIM), "f"), mask=np.ones((4, 1, 1, 9), bool)),
        ValueError,
        "mask has shape (4, 1, 1, 9), expected one that broadcasts to (4, 4, 1, 40); there is a column for each key",
    ),
    (lambda c: c.attention(np.ones((4, 4, 1, 8), "f"), slot=3), TypeError, "'slot'; cuflash calls it slots"),
    (lambda c: c.attention(np.ones((4, 4, 1, 8), "f"), zz=3), TypeError, "KVCache.attention() got an unexpected"),
    (lambda c: c.advance(-1), ValueError, "num_new is -1, expected"),
    (lambda c: c.advance(41), ValueError, "num_new is 41 but slot 0 has 0 of 40"),
    (lambda c: c.free(4), ValueError, "slots is 4, expected 0 to 3"),
    (lambda c: c.free({0}), TypeError, "expected an int of 0 to 3, a slice or a sequence of int"),
    (lambda c: c.free([0, 0]), ValueError, "slots has slot 0 twice"),
    (lambda c: c.fork(0, [0, 1]), ValueError, "targets has slot 0, expected other slots than source"),
    (lambda c: c.fork(0, None), TypeError, "targets is None"),
    (lambda c: c.truncate(True), TypeError, "length is True (bool)"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors(wrong: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        wrong(make(None))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, "float32", np.float64])
def test_dtypes(dtype: Any) -> None:
    cache = cuflash.KVCache(1, 1, 8, 4, page_size=2, dtype=dtype)
    q = np.ones((1, 2, 3, 8), np.dtype(dtype))
    assert cache.attention(q, q[:, :1], q[:, :1]).dtype == np.dtype(dtype)
    assert cache.keys[0].shape == (2, 1, 2, 8) and len(cache.keys) == 1


def _call_with(handler: Any, function: Any) -> None:
    """Call a function, and a handler in front of each line of the accounts."""
    files = cache_memory.__file__, pages.__file__

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)


def _interrupted(function: Any, number: int) -> bool:
    """Call a function, with an interrupt in front of the so many-th line of the accounts; False if there are fewer."""
    lines = iter(range(1, number))

    def handler() -> None:
        if next(lines, None) is None:
            raise KeyboardInterrupt

    try:
        _call_with(handler, function)
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.parametrize(
    ("operation", "page_size"),
    [*product(("append", "advance", "truncate", "fork", "free"), (None, 4)), ("append to a shared page", 4)],
)
def test_an_interrupt_anywhere_leaves_accounts_that_agree(operation: str, page_size: int | None) -> None:
    """Slot 0 has 6 tokens, slot 1 the same; afterwards each has as many of them as it says."""
    q, k, v = np.random.default_rng(5).standard_normal((3, 1, 2, 12, 8), dtype=np.float32)
    for number in range(1, 500):
        cache = cuflash.KVCache(3, 2, 8, capacity=12, num_layers=2, page_size=page_size, dtype=np.float32)
        for layer in (0, 1):
            cache.attention(q[:, :, :6], k[:, :, :6], v[:, :, :6], layer=layer, slots=slice(0, 1))
        cache.advance(6, 0)
        cache.fork(0, slice(1, 2))
        if operation not in ("append to a shared page", "advance"):
            cache.truncate(3, 1)
        one = slice(1, 2)

        def append(layer: int, cache: cuflash.KVCache = cache, one: slice = one) -> Any:
            at = cache.num_keys[1]
            new = slice(at, at + 2)
            return cache.attention(q[:, :, new], k[:, :, new], v[:, :, new], layer=layer, slots=one)

        steps: dict[str, Any] = {
            "append": partial(append, 0),
            "append to a shared page": partial(append, 0),
            "advance": partial(cache.advance, 2, one),
            "truncate": partial(cache.truncate, 2, one),
            "fork": partial(cache.fork, 0, one),
            "free": partial(cache.free, one),
        }
        if operation == "advance":
            append(0), append(1)
        is_over = not _interrupted(steps[operation], number)
        at = cache.num_keys[1]
        for layer in (0, 1):
            stop = at + 2
            expected = cuflash.attention(q[:, :, at:stop], k[:, :, :stop], v[:, :, :stop], causal=True)
            np.testing.assert_allclose(append(layer), expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(
                cache.attention(q[:, :, :2], layer=layer, slots=slice(0, 1), causal=False),
                cuflash.attention(q[:, :, :2], k[:, :, :6], v[:, :, :6]),
                rtol=1e-5,
                atol=1e-6,
            )
        assert tuple(cache.lengths) == cache.num_keys
        cache.free()
        if page_size is not None:
            assert cache.num_free_pages == 9 and (cache.page_table == -1).all()
            cache.reserve(12)
        if is_over:
            assert number > 5, "it has that many lines"
            return
    raise AssertionError("it does not end")


def test_a_signal_handler_may_look_at_a_cache() -> None:
    caches = [cuflash.KVCache(3, 1, 8, capacity=12, page_size=4, num_pages=6) for _ in range(2)]
    for cache, look in zip(caches, (lambda: None, lambda: (repr(caches[1]), caches[1].num_free_pages)), strict=True):
        for change in (
            partial(cache.reserve, 6, 0),
            partial(cache.advance, 6, 0),
            partial(cache.fork, 0, [1, 2]),
            partial(cache.reserve, 4, 1),
            partial(cache.truncate, 3, 2),
            partial(cache.free, 0),
        ):
            _call_with(look, change)
    mine, looked_at = caches
    assert repr(mine) == repr(looked_at)
    np.testing.assert_array_equal(mine.page_table, looked_at.page_table)


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_refused_call_after_an_interrupt_spoils_nothing(is_shared: bool) -> None:
    """Whatever was interrupted: a call, or the giving back of what a refused one had reserved."""
    q, k, v = np.random.default_rng(7).standard_normal((3, 1, 1, 4, 8))
    new = slice(0, 1)
    for number in range(1, 500):
        cache = cuflash.KVCache(2, 1, 8, capacity=8, page_size=4, dtype=np.float64)
        cache.attention(q, k, v, slots=0)
        cache.advance(4, 0)
        if is_shared:
            cache.fork(0, 1)
            cache.truncate(2, 1)
        held = cache.num_keys[1]
        refused = partial(cache.attention, q[:, :, new], k[:, :, new], v[:, :, new], slots=1, scale="x")
        is_over = True
        with suppress(TypeError):
            is_over = not _interrupted(refused, number)
        with pytest.raises(TypeError, match="scale"):
            refused()
        cache.attention(q[:, :, new], -k[:, :, new], -v[:, :, new], slots=1)
        cache.advance(1, 1)
        np.testing.assert_allclose(cache.attention(q, slots=0), cuflash.attention(q, k, v, causal=True))
        keys, values = (np.concatenate([x[:, :, :held], -x[:, :, new]], axis=2) for x in (k, v))
        np.testing.assert_allclose(
            cache.attention(q[:, :, new], slots=1), cuflash.attention(q[:, :, new], keys, values, causal=True)
        )
        cache.free()
        assert cache.num_free_pages == 4
        if is_over:
            assert number > 5, "it has that many lines"
            return
    raise AssertionError("it does not end")
