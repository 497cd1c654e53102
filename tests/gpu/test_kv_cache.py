"""What only a GPU can show of caches: captured steps whose lengths grow, repeated calls, what is checked of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plan.test_splits import assert_rows_alike

import cuflash
from cuflash import reference

pytestmark = pytest.mark.gpu


def _draw(cupy: Any, seed: int, *shape: int, dtype: Any = np.float16) -> Any:
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def _close(out: Any, exact: np.ndarray) -> None:
    np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=3e-3)


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("capacity", [256, 16384])
def test_a_captured_step_goes_on_while_lengths_grow(paged: bool, capacity: int) -> None:
    """One graph serves all steps, with splits and without, and equals calls that are not captured."""
    import cupy

    q, k_new, v_new = _draw(cupy, 0, 2, 8, 1, 64), _draw(cupy, 1, 2, 2, 1, 64), _draw(cupy, 2, 2, 2, 1, 64)
    shape = (2 * capacity // 64, 2, 64, 64) if paged else (2, 2, capacity, 64)
    caches = [cupy.full(shape, np.nan, np.float16) for _ in range(4)]
    options: dict[str, Any] = {}
    if paged:
        table = np.random.default_rng(0).permutation(2 * capacity // 64).reshape(2, -1)
        options["page_table"] = cupy.asarray(table.astype(np.int32))
    lengths, others = (cupy.asarray([0, 3], np.int32) for _ in range(2))
    for x in caches:
        x[...] = 0.5  # some keys of the second batch are there before the first step
    call = cuflash.attention_with_kv_cache
    call(q, *caches[2:], seqlens_k=others, k_new=k_new, v_new=v_new, **options)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out = call(q, *caches[:2], seqlens_k=lengths, k_new=k_new, v_new=v_new, **options)
        cupy.add(lengths, 1, out=lengths)
        graph = stream.end_capture()
    for step in range(70):
        for x in (q, k_new, v_new):
            x[...] = _draw(cupy, 10 + step, *x.shape)
        cupy.cuda.Device().synchronize()
        with stream:
            graph.launch()
        stream.synchronize()
        expected = call(q, *caches[2:], seqlens_k=others, k_new=k_new, v_new=v_new, **options)
        others += 1
        assert out.tobytes() == expected.tobytes()
    assert lengths.tolist() == others.tolist() == [70, 73]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(caches[:2], caches[2:], strict=True))


def test_growing_ints_are_planned_without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    cache = [_draw(cupy, seed, 2, 2, 300, 64) for seed in (0, 1)]
    q, new = _draw(cupy, 2, 2, 4, 1, 64), _draw(cupy, 3, 2, 2, 1, 64)
    cuflash.attention_with_kv_cache(q, *cache, seqlens_k=10, k_new=new, v_new=new)
    with monkeypatch.context() as patch:
        patch.setattr(cuflash.kv_cache, "describe_kv_cache", None)
        for length in range(11, 80):
            out = cuflash.attention_with_kv_cache(q, *cache, seqlens_k=length, k_new=new, v_new=new)
    exact, _ = reference.attention_with_kv_cache(q.get(), *(x.get() for x in cache), seqlens_k=80)
    _close(out, exact)


def test_addresses_are_checked_again() -> None:
    """A call that was right once has its caches apart from other arrays then."""
    import cupy

    memory = _draw(cupy, 0, 3, 2, 2, 40, 64)
    q, new = _draw(cupy, 1, 2, 4, 1, 64), _draw(cupy, 2, 2, 2, 1, 64)
    lengths = cupy.asarray([3, 5], np.int32)
    for _ in range(2):
        cuflash.attention_with_kv_cache(q, memory[0], memory[1], seqlens_k=lengths, k_new=new, v_new=new)
        with pytest.raises(ValueError, match="overlaps"):
            cuflash.attention_with_kv_cache(q, memory[0], memory[0], seqlens_k=lengths, k_new=new, v_new=new)
        with pytest.raises(ValueError, match="overlaps"):
            inside = memory[0][:, :, 7:8]
            cuflash.attention_with_kv_cache(q, memory[0], memory[1], seqlens_k=lengths, k_new=inside, v_new=new)
        with pytest.raises(ValueError, match="k_new has shape"):
            cuflash.attention_with_kv_cache(q, memory[0], memory[1], seqlens_k=lengths, k_new=new[:1], v_new=new)
        with pytest.raises(ValueError, match="seqlens_k has shape"):
            cuflash.attention_with_kv_cache(q, memory[0], memory[1], seqlens_k=lengths[:1], k_new=new, v_new=new)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("pages", [None, (-1, 2**40, 7), (2, -(2**60), 1)], ids=["contiguous", "beyond", "before"])
def test_malformed_lengths_and_tables_stay_inside(dtype: Any, pages: tuple[int, ...] | None) -> None:
    import cupy

    padding = 64 * 40
    shape = (3, 2, 40, 64) if pages is None else (3, 2, 16, 64)
    size = int(np.prod(shape))
    buffers = [cupy.full(size + 2 * padding, np.nan, dtype) for _ in range(2)]
    k, v = (x[padding:-padding].reshape(shape) for x in buffers)
    for x in (k, v):
        x[...] = 1
    q, new = cupy.ones((3, 4, 2, 64), dtype), cupy.ones((3, 2, 2, 64), dtype)
    lengths = cupy.asarray([-5, 2**63 - 1, 39], np.int64)
    options: dict[str, Any] = {} if pages is None else {"page_table": cupy.asarray([pages] * 3, np.int64)}
    out = cuflash.attention_with_kv_cache(q, k, v, seqlens_k=lengths, k_new=new, v_new=new, **options)
    np.testing.assert_allclose(out.get().astype(np.float64), 1, rtol=1e-3)
    for x in buffers:
        assert bool(cupy.isnan(x[:padding]).all()) and bool(cupy.isnan(x[-padding:]).all())


def test_nothing_is_launched_for_what_is_refused() -> None:
    import cupy

    cache = [_draw(cupy, seed, 2, 2, 40, 64) for seed in (0, 1)]
    before = [x.copy() for x in cache]
    q, new = _draw(cupy, 2, 2, 4, 1, 64), _draw(cupy, 3, 2, 2, 1, 64)
    with pytest.raises(ValueError, match="cannot serve this call"), cuflash.options(kernel="precise_float64"):
        cuflash.attention_with_kv_cache(q, *cache, seqlens_k=3, k_new=new, v_new=new)
    with pytest.raises(ValueError, match="workspace has"):
        many = [_draw(cupy, seed, 2, 2, 20_000, 64) for seed in (0, 1)]
        small = cupy.empty(16, np.uint8)
        cuflash.attention_with_kv_cache(q, *many, seqlens_k=9999, k_new=new, v_new=new, num_splits=4, workspace=small)
    assert all(bool((a == b).all()) for a, b in zip(cache, before, strict=True))


@pytest.mark.parametrize(("dtype", "window"), [(np.float16, None), (np.float16, (1000, None)), (np.float32, None)])
def test_rows_of_equal_splits_are_alike(dtype: Any, window: Any) -> None:
    import cupy

    options = {} if window is None else {"window": window}
    assert_rows_alike(cuflash.attention_with_kv_cache, cupy, dtype, 4000, 1024, **options)
