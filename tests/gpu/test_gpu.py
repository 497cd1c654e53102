"""What only a GPU can show: streams, devices, graphs, allocation, large arrays, foreign arrays, host time."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import cuflash
from cuflash import reference
from cuflash.gpu import execute, launch
from cuflash.gpu.compile import compile_offline
from cuflash.plan.plan import make_plan
from cuflash.problem.describe import describe_attention
from cuflash.settings import AUTOMATIC

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


def _draw(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return cupy.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def _close(out: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    expected, _ = reference.attention(q.get(), k.get(), v.get(), **options)
    np.testing.assert_allclose(out.get(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["forward_mma", "forward_wmma", "forward_scalar"])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize(("num_keys", "bias_dtype"), [(304, np.float16), (304, np.float32), (299, np.float16)])
def test_bias_hides_keys_that_are_no_numbers(num_keys: int, bias_dtype: Any, head_dim: int, kernel: str) -> None:
    q, k, v = (_draw(2, 3, n, head_dim, dtype=np.float16, seed=n) for n in (200, num_keys, num_keys + 1))
    v, hidden, bias = v[:, :, 1:], [3, 70, 250], _draw(3, 200, num_keys, dtype=bias_dtype)
    bias[:, :180, hidden] = -np.inf
    k[:, :, hidden] = 0
    with cuflash.options(kernel=kernel):
        expected = cuflash.attention(q, k, v, bias=bias).get()
        for row, value in zip(hidden, (np.nan, np.inf, -np.inf), strict=True):
            k[:, :, row] = value
        out = cuflash.attention(q, k, v, bias=bias).get()
    assert out[:, :, :180].tobytes() == expected[:, :, :180].tobytes()
    assert np.isnan(out[:, :, 180:]).all() and np.isfinite(expected).all()


def test_other_stream_orders_with_its_own_work() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    q = _draw(1, 4, 300, 64)
    with stream:
        delayed = q * 1
        for _ in range(50):
            delayed = delayed * 1
        out = cuflash.attention(delayed, delayed, delayed)
    stream.synchronize()
    _close(out, q, q, q)


def test_other_device() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with cupy.cuda.Device(1):
        q = _draw(1, 2, 100, 64)
    out = cuflash.attention(q, q, q, causal=True)
    assert out.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
    _close(out, q, q, q, causal=True)
    with pytest.raises(ValueError, match="k is on GPU 0 but q is on GPU 1"):
        cuflash.attention(q, _draw(1, 2, 100, 64), q)


def test_graph_capture_replays_with_new_data() -> None:
    q, out, lse = _draw(2, 2, 130, 64), cupy.empty((2, 2, 130, 64), np.float32), cupy.empty((2, 2, 130), np.float32)
    cuflash.warmup(cuflash.attention, q, q, q, causal=True, out=out, lse=lse)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuflash.attention(q, q, q, causal=True, out=out, lse=lse)
        allocated = cuflash.attention(q, q, q)
        graph = stream.end_capture()
        q *= 0.5
        graph.launch()
    stream.synchronize()
    _close(out, q, q, q, causal=True)
    _close(allocated, q, q, q)


def test_lse_alone(allocations: Any) -> None:
    """New, in place, replayed with new data, with one allocation, and for arrays of other lengths."""
    q = _draw(2, 4, 130, 64)
    out = cupy.empty((2, 4, 2 * 130), np.float32)[..., ::2]
    for keys in (130, 70, 130, 190):
        k = _draw(2, 2, keys, 64, seed=1)
        expected = reference.attention_lse(q.get(), k.get(), causal=True)
        with allocations() as sizes:
            lse = cuflash.attention_lse(q, k, causal=True)
        assert sizes == [lse.nbytes] and lse.dtype == np.float32
        np.testing.assert_allclose(lse.get(), expected, rtol=1e-5, atol=1e-5)
        assert cuflash.attention_lse(q, k, causal=True, out=out) is out
        np.testing.assert_array_equal(out.get(), lse.get())
    with pytest.raises(ValueError, match="out overlaps q in memory"):
        cuflash.attention_lse(q, k, causal=True, out=q[..., 0])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuflash.attention_lse(q, k, causal=True, out=out)
        allocated = cuflash.attention_lse(q, k, causal=True)
        graph = stream.end_capture()
        q *= 0.5
        graph.launch()
    stream.synchronize()
    expected = reference.attention_lse(q.get(), k.get(), causal=True)
    for lse in (out, allocated):
        np.testing.assert_allclose(lse.get(), expected, rtol=1e-5, atol=1e-5)


def test_allocates_results_only(allocations: Any) -> None:
    q = _draw(2, 4, 130, 64)
    cuflash.attention(q, q, q, return_lse=True)
    with allocations() as sizes:
        out, lse = cuflash.attention(q, q, q, return_lse=True)
    assert sizes == [out.nbytes, lse.nbytes]


@pytest.mark.alone
def test_never_synchronises() -> None:
    q = _draw(1, 16, 4096, 64)
    cuflash.attention(q, q, q)
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    for _ in range(10):
        cuflash.attention(q, q, q)
    queued = time.perf_counter() - begin
    cupy.cuda.Device().synchronize()
    assert queued < (time.perf_counter() - begin) / 3


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_more_than_two_to_the_31_elements(dtype: Any) -> None:
    if cupy.cuda.runtime.memGetInfo()[0] < 40 << 30:
        pytest.skip("needs 40 GB of free GPU memory")
    long = cupy.zeros((1, 1, 2**25 + 3, 64), dtype)  # 2^31 elements and a few
    long[..., -5:, :] = _draw(5, 64, dtype=dtype)
    q = _draw(1, 1, 3, 64, dtype=dtype)
    out = cuflash.attention(q, long, long, window=(4, 0), causal=True)
    few = long[..., -7:, :].copy()
    expected = cuflash.attention(q, few, few, window=(4, 0), causal=True)
    np.testing.assert_allclose(out.get(), expected.get(), rtol=2e-3, atol=1e-5)
    result = cuflash.attention(long, few, few)
    for rows in (slice(-5, None), slice(3)):
        with cuflash.options(kernel=cuflash.explain(cuflash.attention, long, few, few).kernel):
            expected = cuflash.attention(long[..., rows, :], few, few)
        np.testing.assert_array_equal(result[0, 0, rows].get(), expected[0, 0].get())


def test_more_keys_than_two_to_the_31() -> None:
    if cupy.cuda.runtime.memGetInfo()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free GPU memory")
    k = cupy.zeros((2**31 + 100, 1), np.float16)
    k[-40:] = _draw(40, 1, dtype=np.float16)
    q = _draw(2, 1, dtype=np.float16)
    out = cuflash.attention(q, k, k, window=(30, 0))
    np.testing.assert_allclose(out.get(), cuflash.attention(q, k[-40:], k[-40:], window=(30, 0)).get(), rtol=1e-3)


def test_more_heads_than_a_grid_axis() -> None:
    q = _draw(70_000, 2, 3, 8, dtype=np.float16)
    out = cuflash.attention(q, q, q)
    np.testing.assert_array_equal(out[-1].get(), cuflash.attention(q[-1], q[-1], q[-1]).get())


def test_launches_in_parts_when_the_grid_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    q = _draw(3, 5, 200, 32)
    expected = cuflash.attention(q, q, q, causal=True)
    monkeypatch.setattr(launch, "MAX_GRID", 7)
    monkeypatch.setattr(execute, "_launches", {})
    np.testing.assert_array_equal(cuflash.attention(q, q, q, causal=True).get(), expected.get())


def test_threads_share_everything() -> None:
    inputs = [_draw(1, 2, 64 + 8 * i, 64, seed=i) for i in range(8)]
    expected = [cuflash.attention(x, x, x).get() for x in inputs]
    failures: list[int] = []

    def work(index: int) -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(50):
                out = cuflash.attention(inputs[index], inputs[index], inputs[index])
            stream.synchronize()
            if not np.array_equal(out.get(), expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_results_keep_the_axis_order_of_the_query() -> None:
    x = _draw(2, 50, 4, 64).swapaxes(1, 2)
    out, lse = cuflash.attention(x, x, x, return_lse=True)
    assert out.strides == x.strides and out.swapaxes(1, 2).flags.c_contiguous
    assert lse.swapaxes(1, 2).flags.c_contiguous


def test_overlapping_out_is_refused_also_for_a_known_kind() -> None:
    memory = _draw(4, 2, 64, 32)
    q, other = memory[:2], memory[2:]
    cuflash.attention(q, q, q, out=other)
    with pytest.raises(ValueError, match="out overlaps q"):
        cuflash.attention(q, q, q, out=memory[1:3])
    interleaved = _draw(2, 64, 2, 32)
    cuflash.attention(interleaved[:, :, 0], interleaved[:, :, 0], interleaved[:, :, 0], out=interleaved[:, :, 1])


def test_mixing_numpy_and_gpu_is_refused() -> None:
    q = _draw(2, 10, 16)
    with pytest.raises(TypeError, match="k is a NumPy array but q is a GPU array"):
        cuflash.attention(q, q.get(), q)
    with pytest.raises(TypeError, match="mask is a NumPy array"):
        cuflash.attention(q, q, q, mask=np.ones((10, 10), bool))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_arrays(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 3, 70, 64, device="cuda", dtype=getattr(torch, dtype))
    out = cuflash.attention(q, q, q, causal=True)
    assert type(out) is cupy.ndarray
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double(), is_causal=True)
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(out.astype(np.float64).get(), expected.cpu().numpy(), rtol=tolerance, atol=tolerance)
    into = torch.empty_like(q)
    assert cuflash.attention(q, q, q, causal=True, out=into) is into
    np.testing.assert_array_equal(cupy.from_dlpack(into).get(), out.get())
    mask = torch.ones(70, 70, device="cuda", dtype=torch.bool).tril()
    masked = cuflash.attention(q, q, q, mask=mask).astype(np.float64).get()  # another kernel may serve it
    np.testing.assert_allclose(masked, expected.cpu().numpy(), rtol=tolerance, atol=tolerance)
    with pytest.raises(TypeError, match=r"k is a torch\.Tensor that is not on a CUDA device"):
        cuflash.attention(q, q.cpu(), q)
    with pytest.raises(TypeError, match=r"requires? grad"):
        cuflash.attention(q.clone().requires_grad_(), q, q)


def test_repeated_calls_with_torch_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are looked up as CuPy's are, and with those; what cannot be taken gets its error all the same."""
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 2, 3, 70, 64, device="cuda", dtype=torch.bfloat16)
    slopes, into = torch.rand(3, device="cuda"), torch.empty_like(q)
    expected = cuflash.attention(*map(cupy.from_dlpack, (q, k, v)), alibi_slopes=cupy.from_dlpack(slopes)).view("i2")
    into_cupy = cuflash.attention(q, k, v, alibi_slopes=slopes, out=cupy.from_dlpack(into))
    assert (into_cupy.view("i2") == expected).all()

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("checked anew")

    with monkeypatch.context() as patch:
        patch.setattr(cuflash.dense, "describe_attention", unexpected)
        for mixed in ((q, k, v), (cupy.from_dlpack(q), k, cupy.from_dlpack(v)), (q.clone(), k.clone(), v.clone())):
            assert (cuflash.attention(*mixed, alibi_slopes=slopes).view("i2") == expected).all()
        into.zero_()
        assert cuflash.attention(q, k, v, alibi_slopes=slopes, out=into) is into
        assert (cupy.from_dlpack(into).view("i2") == expected).all()
    with pytest.raises(TypeError, match=r"v is a torch\.Tensor that is not on a CUDA device"):
        cuflash.attention(q, k, v.cpu(), alibi_slopes=slopes)
    with pytest.raises(TypeError, match="alibi_slopes is a NumPy array"):
        cuflash.attention(q, k, v, alibi_slopes=slopes.cpu().numpy())
    with pytest.raises(ValueError, match="out"):
        cuflash.attention(q, k, v, alibi_slopes=slopes, out=q)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nothing_in_place_of_an_array_of_an_earlier_call(name: str) -> None:
    arrays = dict.fromkeys("qkv", cupy.ones((2, 10, 16), np.float32))
    cuflash.attention(**arrays)
    with pytest.raises(TypeError, match=f"{name} is None"):
        cuflash.attention(**arrays | {name: None})


def test_numba_arrays() -> None:
    numba_cuda = pytest.importorskip("numba.cuda")
    x = np.random.default_rng(0).standard_normal((2, 40, 32)).astype(np.float32)
    on_gpu = numba_cuda.to_device(x)
    _close(cuflash.attention(on_gpu, on_gpu, on_gpu), *[cupy.asarray(x)] * 3)


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((2, 40, 32)), dtype="float32")
    _close(cuflash.attention(x, x, x), *[cupy.asarray(np.asarray(x))] * 3)
    with pytest.raises((ValueError, TypeError), match="out"):
        cuflash.attention(x, x, x, out=x)


@pytest.mark.parametrize("values", [(5, 3, 100, 20), (-7, 40, 30, 900), (0, 10**9, 10**9, 10**9), (100, 100, 100, 100)])
def test_malformed_cu_seqlens_stay_inside_the_arrays(values: tuple[int, ...]) -> None:
    padding = 64
    buffers = [cupy.full((100 + 2 * padding, 4, 32), np.nan, np.float32) for _ in range(4)]
    q, k, v, out = (x[padding:-padding] for x in buffers)
    for x in (q, k, v):
        x[...] = 1
    out[...] = 7
    boundaries = cupy.asarray(values, np.int64)
    cuflash.attention_varlen(q, k, v, boundaries, boundaries, out=out)
    assert bool(cupy.isfinite(out).all())
    assert bool(cupy.isnan(buffers[3][:padding]).all()) and bool(cupy.isnan(buffers[3][-padding:]).all())


def test_no_drift_over_many_keys() -> None:
    rng = cupy.random.default_rng(0)
    for dtype in (np.float16, np.float32):
        q = rng.standard_normal((16, 64), dtype=np.float32).astype(dtype)
        k = rng.standard_normal((1 << 18, 64), dtype=np.float32).astype(dtype)
        v = (1 + 0.1 * rng.standard_normal((1 << 18, 64), dtype=np.float32)).astype(dtype)
        exact = _exact(q, k, v)
        error = float(cupy.linalg.norm(cuflash.attention(q, k, v).astype(np.float64) - exact) / cupy.linalg.norm(exact))
        rounding = float(cupy.linalg.norm(exact.astype(dtype).astype(np.float64) - exact) / cupy.linalg.norm(exact))
        assert error <= max(1.1 * rounding, 1.5e-6)  # 4096 tiles joined in float32


def _exact(q: Any, k: Any, v: Any) -> Any:
    scores = q.astype(np.float64) @ k.astype(np.float64).T * q.shape[-1] ** -0.5
    weights = cupy.exp(scores - scores.max(-1, keepdims=True))
    return weights @ v.astype(np.float64) / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_error_is_that_of_a_naive_computation(dtype: Any) -> None:
    rng = cupy.random.default_rng(1)
    for mean, scale in ((0, 1), (3, 1), (0, 6), (0, 0.01)):
        q, k, v = (mean + scale * rng.standard_normal((500, 64), dtype=np.float32) for _ in range(3))
        q, k, v = (x.astype(dtype) for x in (q, k, v))
        exact = _exact(q, k, v)
        wide = [x.astype(np.float32) for x in (q, k, v)]
        scores = wide[0] @ wide[1].T * np.float32(64**-0.5)
        weights = cupy.exp(scores - scores.max(-1, keepdims=True))
        naive = (weights @ wide[2] / weights.sum(-1, keepdims=True)).astype(dtype)
        differences = (x.astype(np.float64) - exact for x in (cuflash.attention(q, k, v), naive))
        errors = [float(cupy.linalg.norm(difference) / cupy.linalg.norm(exact)) for difference in differences]
        assert errors[0] <= 2 * errors[1], (mean, scale, errors)


def test_registers_are_known_again_and_again() -> None:
    """NVRTC has a cache on GPU machines, which keeps kernels and forgets what the assembler said of them."""
    x = _draw(1, 2, 100, 64)
    plan = make_plan(describe_attention(x, x, x)[0], launch.device_info(0), AUTOMATIC)
    arch = launch.device_info(0).arch
    first, second = (compile_offline(plan.program, arch) for _ in range(2))
    assert first.registers == second.registers > 0


@pytest.mark.alone
def test_host_time() -> None:
    """A repeated call and a new length; generous here, the benchmark reports the numbers."""
    q = _draw(1, 1, 16, 64)
    cuflash.attention(q, q, q)
    lengths = [cupy.empty((1, 1, n, 64), np.float32) for n in range(17, 217)]
    cupy.cuda.Device().synchronize()

    def best(calls: int, function: Any) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            function()
            times.append((time.perf_counter() - begin) / calls)
            cupy.cuda.Device().synchronize()
        return min(times) * 1e6

    repeated = best(200, lambda: [cuflash.attention(q, q, q) for _ in range(200)])

    def new_lengths() -> None:
        execute._launches.clear()
        for x in lengths:
            cuflash.attention(x, x, x)

    new = best(200, new_lengths)
    print(f"host time: repeated call {repeated:.1f} us, new length {new:.1f} us")
    assert repeated < 36 and new < 120
