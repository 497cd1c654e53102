"""Attention of several ranks, which are threads: equal to that of the whole sequence, and always of the same bits."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import pytest

import cuflash
from cuflash import distributed, reference
from cuflash.distributed import dense, ring, shard, unshard
from cuflash.problem.arrays import DTYPES

from .threads import ThreadLink, run_ranks, use_links

LAYOUTS = ("contiguous", "zigzag")
EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    use_links(monkeypatch)


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    drawn: np.ndarray = rng.standard_normal(shape).astype(DTYPES[dtype])
    return drawn


def cut(x: np.ndarray, lengths: list[int], axis: int) -> list[np.ndarray]:
    return np.split(x, np.cumsum(lengths)[:-1], axis=axis)


def together(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    size: int,
    layout: Any = "contiguous",
    num_parts: int = 1,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """What ranks find that have even parts, put together, and their links."""
    pairs = {name: options.pop(name) for name in ("bias", "mask") if name in options}

    def call(rank: int, comm: Any) -> Any:
        mine = [shard(x, rank, size, layout=layout) for x in (q, k, v)]
        rows = {
            name: shard(x, rank, size, layout=layout) if x.ndim > 1 and x.shape[-2] > 1 else x
            for name, x in pairs.items()
        }
        return distributed.attention(
            *mine, comm, layout=layout, num_parts=num_parts, return_lse=True, **rows, **options
        )

    found, links = run_ranks(size, call)
    for error in found:
        if isinstance(error, Exception):
            raise error
    outs, lses = zip(*found, strict=True)
    return unshard(outs, layout=layout), unshard(lses, axis=-1, layout=layout), links


def assert_right(dtype: str, found: tuple[Any, ...], arrays: list[np.ndarray], **options: Any) -> None:
    """At most twice as far from float64 as the same formula in that type is, and rounding."""
    out, lse, *_ = found
    exact, exact_lse = reference.attention(*arrays, **options)
    one, one_lse = cuflash.attention(*arrays, return_lse=True, **options)
    error = np.abs(out.astype(np.float64) - exact).max(initial=0.0)
    ours = np.abs(one.astype(np.float64) - exact).max(initial=0.0)
    scale = np.abs(exact).max(initial=1.0)
    assert error <= 2 * ours + 4 * EPS[dtype] * scale
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(exact_lse))
    assert not np.isnan(out.astype(np.float64)).any() and not np.isnan(lse).any()
    finite = np.isfinite(exact_lse)
    np.testing.assert_array_equal(lse[~finite], exact_lse[~finite])
    lse, one_lse, exact_lse = lse[finite], one_lse[finite], exact_lse[finite]
    bound = 2 * np.abs(one_lse - exact_lse).max(initial=0.0)
    bound += 4 * EPS["float64" if dtype == "float64" else "float32"] * np.abs(exact_lse).max(initial=1.0)
    assert np.abs(lse - exact_lse).max(initial=0.0) <= bound


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (11, 5)},
    "left": {"window": (7, 0)},
    "far": {"causal": True, "query_offset": -40},
    "beyond": {"window": (30, None), "query_offset": 500},
    "softcap": {"softcap": 2.0, "scale": 0.7, "causal": True},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1, 2.0, 0.0])},
    "alibi_far": {"alibi_slopes": np.array([0.5, 0.1, 2.0, 0.0]), "query_offset": 10**6},
    "sinks": {"sinks": np.array([0.0, 3.0, -np.inf, np.inf]), "causal": True},
    "bias": {"bias": np.linspace(-3, 3, 97)},
    "masked": {"bias": np.full(97, -1e9), "sinks": np.full(4, -1e9)},
    "mask": {"mask": np.arange(97) % 3 > 0, "window": (20, 20)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", EPS)
def test_options(dtype: str, name: str, layout: str, rng: np.random.Generator) -> None:
    arrays = [draw(rng, dtype, 2, heads, length, 16) for heads, length in ((4, 61), (2, 97), (2, 97))]
    found = together(*arrays, 3, layout, **OPTIONS[name])
    assert_right(dtype, found, arrays, **OPTIONS[name])
    again = together(*arrays, 3, layout, **OPTIONS[name])
    assert found[0].tobytes() == again[0].tobytes() and found[1].tobytes() == again[1].tobytes()


@pytest.mark.parametrize("seed", range(40))
def test_random_parts(seed: int) -> None:
    """Lengths of every rank drawn, empty ones too, and arrays whose rows lie anyhow."""
    rng = np.random.default_rng(seed)
    size, dtype = int(rng.integers(1, 6)), str(rng.choice(["float16", "float32", "float64"]))
    layout: Any = str(rng.choice(LAYOUTS))
    lengths_q, lengths_k = ([int(x) for x in rng.integers(0, 40, size) * (rng.random(size) > 0.2)] for _ in range(2))
    group, heads = int(rng.integers(1, 4)), int(rng.integers(1, 3))
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["causal"] = True
    if rng.random() < 0.4:
        options["window"] = tuple(None if rng.random() < 0.2 else int(x) for x in rng.integers(0, 50, 2))
    if rng.random() < 0.3:
        options["query_offset"] = int(rng.integers(-60, 100))
    if rng.random() < 0.3:
        options["alibi_slopes"] = rng.random(heads * group)
    if rng.random() < 0.3:
        options["sinks"] = rng.standard_normal(heads * group)
    parts_q = [draw(rng, dtype, 1, heads * group, n, 8) for n in lengths_q]
    parts_k = [draw(rng, dtype, 1, heads, n, 8) for n in lengths_k]
    parts_v = [draw(rng, dtype, 1, n, heads, 5).swapaxes(1, 2) for n in lengths_k]
    num_parts = int(rng.integers(1, 4))

    def call(rank: int, comm: Any) -> Any:
        mine = parts_q[rank], parts_k[rank], parts_v[rank]
        return distributed.attention(*mine, comm, layout=layout, num_parts=num_parts, return_lse=True, **options)

    found, _ = run_ranks(size, call)
    whole = [unshard(parts, layout=layout) for parts in (parts_q, parts_k, parts_v)]
    out = unshard([x[0] for x in found], layout=layout)
    lse = unshard([x[1] for x in found], axis=-1, layout=layout)
    assert_right(dtype, (out, lse), whole, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["plain", "causal", "window", "alibi"])
def test_bits_do_not_depend_on_the_number_of_ranks(
    name: str, dtype: str, layout: str, rng: np.random.Generator
) -> None:
    arrays = [draw(rng, dtype, heads, length, 16) for heads, length in ((4, 160), (2, 320), (2, 320))]
    found = [together(*arrays, size, layout, 4 // size, **OPTIONS[name])[:2] for size in (1, 2, 4)]
    for out, lse in found[1:]:
        assert out.tobytes() == found[0][0].tobytes() and lse.tobytes() == found[0][1].tobytes()


def test_bits_do_not_depend_on_ranks_without_rows(rng: np.random.Generator) -> None:
    arrays = [draw(rng, "float32", 2, 50, 16) for _ in range(3)]
    (alone, lse), _ = run_ranks(1, lambda rank, comm: distributed.attention(*arrays, comm, return_lse=True))[0][0], 0
    nothing = [x[:, :0] for x in arrays]

    def call(rank: int, comm: Any) -> Any:
        return distributed.attention(*(arrays if rank == 1 else nothing), comm, return_lse=True)

    found, _ = run_ranks(3, call)
    assert found[1][0].tobytes() == alone.tobytes() and found[1][1].tobytes() == lse.tobytes()
    assert found[0][0].shape == (2, 0, 16)


def test_one_key_gives_its_value(rng: np.random.Generator) -> None:
    """To the bit: what no other part adds to is not rounded."""
    q, k, v = (draw(rng, "float32", 1, 40, 8) for _ in range(3))
    out, lse, _ = together(q, k, v, 4, window=(0, 0))
    assert out.tobytes() == v.tobytes()
    assert np.isfinite(lse).all()


def test_hidden_keys_may_hold_anything(rng: np.random.Generator) -> None:
    q, k, v = (draw(rng, "float32", 2, 40, 8) for _ in range(3))
    expected = together(q, k, v, 4, causal=True)[0]
    k[:, 39] = np.nan
    assert together(q, k, v, 4, causal=True)[0][:, :39].tobytes() == expected[:, :39].tobytes()


def test_what_nobody_sees_is_not_sent(rng: np.random.Generator) -> None:
    q, k, v = (draw(rng, "float32", 2, 80, 8) for _ in range(3))
    row = 2 * 8 * 4 * 2  # of keys and values

    def sent(size: int, **options: Any) -> list[list[tuple[int, int]]]:
        return [link.sent for link in together(q, k, v, size, **options)[2]]

    assert sent(4, window=(0, 0)) == [[], [], [], []]
    # The last three keys of a rank are all that the next one's queries see.
    assert [sum(size for _, size in x) for x in sent(4, window=(3, 0))] == [3 * row] * 3 + [0]
    assert [[to for to, _ in x[::2]] for x in sent(4, causal=True)] == [[1, 2, 3], [2, 3], [3], []]
    # Zigzag: of ranks behind it a rank sees both halves, of those before it the first one.
    zigzag = sent(4, causal=True, layout="zigzag")
    assert [sum(size for _, size in x) // row for x in zigzag] == [30, 40, 50, 60]


def test_work_is_balanced() -> None:
    """Pairs of queries and visible keys of each rank, with zigzag and causal."""
    for size in (2, 4, 8):
        positions = [shard(np.arange(64 * size), rank, size, axis=0, layout="zigzag") for rank in range(size)]
        pairs = [int((x + 1).sum()) for x in positions]
        assert max(pairs) == min(pairs)


X = np.ones((2, 8, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: shard(X, 2, 2), ValueError, "rank is 2, expected 0 to 1"),
        (lambda: shard(X, True, 2), TypeError, "rank is True (bool), expected an int of 0 to 1"),
        (lambda: shard(X, 10**5000, 2), ValueError, "rank is an int of 16610 bits, expected an int of 0 to 1"),
        (lambda: shard(X, 0, 0), ValueError, "size is 0, expected 1 to 65536"),
        (lambda: shard(X, 0, 10**30), ValueError, "size is 1000000000000000000000000000000, expected 1 to 65536"),
        (lambda: shard(X, 0, 2.5), TypeError, "size is 2.5 (float), expected an int of 1 to 65536"),
        (lambda: shard(X, 0, 2, axis="a"), TypeError, "axis is 'a' (str), expected an int of -3 to 2"),
        (lambda: shard(X, 0, 2, axis=3), ValueError, "axis is 3, expected -3 to 2"),
        (lambda: shard(np.array(1.0), 0, 2), ValueError, "x has shape (), expected an axis of the sequence"),
        (
            lambda: shard(X, 0, 2, layout=np.array(["zigzag"] * 2)),
            ValueError,
            "layout is a ndarray of shape (2,), expected",
        ),
        (lambda: unshard([X, X], axis=True), TypeError, "axis is True (bool), expected an int of -3 to 2"),
        (lambda: unshard([X, X[:1]]), ValueError, "parts[1] has shape (1, 8, 4) but parts[0] has (2, 8, 4), expected"),
        (lambda: unshard([X, X[0]]), ValueError, "parts[1] has shape (8, 4) but parts[0] has (2, 8, 4), expected"),
        (lambda: unshard([X, X.astype(float)]), TypeError, "parts[1] has dtype float64 but parts[0] has float32"),
        (lambda: shard([1, 2, 3], 0, 2, axis=0), TypeError, "x is a list, expected a NumPy or CuPy array"),
        (lambda: unshard(X), TypeError, "parts is a ndarray, expected a list of arrays"),
        (
            lambda: unshard(None),
            TypeError,
            "parts is a NoneType, expected a list of arrays; gather gives it to one rank",
        ),  # type: ignore[arg-type]
        (lambda: unshard([X, None]), TypeError, "parts[1] is None, expected a NumPy or CuPy array"),
        (lambda: unshard([]), ValueError, "parts is empty, expected one array for each rank"),
    ],
)
def test_what_shard_and_unshard_refuse(call: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        call()


def test_results_are_written_in_place(rng: np.random.Generator) -> None:
    arrays = [draw(rng, "float32", 3, 30, 8) for _ in range(3)]
    expected = together(*arrays, 2)

    def call(rank: int, comm: Any) -> Any:
        mine = [shard(x, rank, 2) for x in arrays]
        out, lse = np.full((3, 15, 16), np.nan, np.float64)[..., ::2], np.full((15, 3), np.nan, np.float32).T
        found = distributed.attention(*mine, comm, out=out, lse=lse)
        assert found[0] is out and found[1] is lse
        return found

    found, _ = run_ranks(2, call)
    assert unshard([x[0] for x in found]).astype(np.float32).tobytes() == expected[0].tobytes()
    np.testing.assert_array_equal(unshard([x[1] for x in found], axis=-1), expected[1])


def test_one_head_and_broadcast_batches(rng: np.random.Generator) -> None:
    q, k, v = draw(rng, "float64", 20, 8), draw(rng, "float64", 30, 8), draw(rng, "float64", 30, 4)
    out, lse, _ = together(q, k, v, 2, causal=True)
    assert out.shape == (20, 4) and lse.shape == (20,)
    assert_right("float64", (out, lse), [q, k, v], causal=True)
    q, k, v = draw(rng, "float64", 3, 1, 4, 20, 8), draw(rng, "float64", 2, 2, 30, 8), draw(rng, "float64", 2, 30, 4)
    found = together(q, k, v, 2)
    assert found[0].shape == (3, 2, 4, 20, 4)
    assert_right("float64", found, [q, k, v])


def test_out_dtype(rng: np.random.Generator) -> None:
    arrays = [draw(rng, "float16", 2, 40, 16) for _ in range(3)]
    wide = together(*arrays, 2, out_dtype=np.float32)[0]
    assert wide.dtype == np.float32
    assert wide.astype(np.float16).tobytes() == together(*arrays, 2)[0].tobytes()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "layout": ({"layout": "round"}, ValueError, "layout is 'round', expected 'contiguous' or 'zigzag'"),
    "num_parts": ({"num_parts": 0}, ValueError, "num_parts is 0, expected an int from 1 to 4096"),
    "query_offset": ({"query_offset": np.array([1, 2])}, TypeError, "query_offset is"),
    "causal": ({"causal": None}, TypeError, "causal is None"),
    "window": ({"window": (-1, 0)}, ValueError, "window"),
    "scale": ({"scale": "a"}, TypeError, "scale"),
    "bias": ({"bias": np.zeros((3, 40))}, ValueError, "bias has shape"),
    "columns": ({"bias": np.zeros(39)}, ValueError, "bias of rank 0 has 39 columns, expected 40"),
    "mask": ({"mask": np.zeros(40)}, TypeError, "mask has dtype float64"),
    "no_axes": ({"mask": np.array(True)}, ValueError, "mask has no axes"),
    "sinks": ({"sinks": np.zeros(5)}, ValueError, "sinks has shape"),
    "out": ({"out": np.zeros((2, 3, 8))}, ValueError, "out has shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_options(name: str, rng: np.random.Generator) -> None:
    options, kind, message = WRONG[name]
    arrays = [draw(rng, "float32", 2, 20, 8) for _ in range(3)]
    found, _ = run_ranks(2, lambda rank, comm: distributed.attention(*arrays, comm, **options))
    for error in found:
        assert type(error) is kind and message in str(error)


DIFFERENT: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"causal": True}, "causal is True on rank 1, expected False as on rank 0"),
    "scale": ({"scale": 2.0}, "scale is 2.0 on rank 1"),
    "softcap": ({"softcap": 2.0}, "softcap is 2.0 on rank 1"),
    "layout": ({"layout": "zigzag"}, "layout is zigzag on rank 1"),
    "query_offset": ({"query_offset": 3}, "query_offset is 3 on rank 1, expected None as on rank 0"),
    "num_parts": ({"num_parts": 3}, "num_parts is 3 on rank 1"),
    "sinks": ({"sinks": np.zeros(2)}, "whether there are sinks is True on rank 1, expected False as on rank 0"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_in_options(name: str, rng: np.random.Generator) -> None:
    options, message = DIFFERENT[name]
    arrays = [draw(rng, "float32", 2, 20, 8) for _ in range(3)]
    found, _ = run_ranks(3, lambda rank, comm: distributed.attention(*arrays, comm, **(options if rank == 1 else {})))
    for error in found:
        assert type(error) is ValueError and message in str(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.astype(np.float64), "dtype is float64 on rank 2, expected float32 as on rank 0"),
        (lambda x: x[..., :4], "head_dim is 4 on rank 2, expected 8 as on rank 0"),
        (lambda x: x[:1], "number of heads is [1, 1] on rank 2, expected [2, 2] as on rank 0"),
        (lambda x: x[None], "batch is [1] on rank 2, expected [] as on rank 0"),
    ],
)
def test_ranks_that_differ_in_arrays(change: Any, message: str, rng: np.random.Generator) -> None:
    arrays = [draw(rng, "float32", 2, 20, 8) for _ in range(3)]

    def call(rank: int, comm: Any) -> Any:
        return distributed.attention(*(change(x) if rank == 2 else x for x in arrays), comm)

    found, _ = run_ranks(3, call)
    for error in found:
        assert type(error) is ValueError and message in str(error)


def test_an_error_of_one_rank_is_raised_on_all(rng: np.random.Generator) -> None:
    q, k, v = (draw(rng, "float32", 2, 20, 8) for _ in range(3))

    def call(rank: int, comm: Any) -> Any:
        return distributed.attention(q, k, v[:, :19] if rank == 1 else v, comm)

    found, _ = run_ranks(3, call)
    assert str(found[1]) == "v has 19 keys (axis -2) but k has 20"
    for rank in (0, 2):
        assert str(found[rank]) == "rank 1 raised ValueError: v has 19 keys (axis -2) but k has 20"


class Told(ThreadLink):
    """Keeps what the other ranks would be told."""

    def __init__(self) -> None:
        super().__init__(0, 1, {}, threading.Barrier(1))
        self.errors: list[BaseException] = []

    def abort(self, error: BaseException) -> None:
        self.errors.append(error)

    def record(self) -> str:
        return bytes(self._shared["record", 0]).decode()


@pytest.mark.parametrize(("error", "is_told"), [(KeyboardInterrupt(), True), (ValueError("of all ranks"), False)])
def test_others_hear_of_an_interrupt_behind_the_records(
    error: BaseException, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agree(records: Any, own: Any) -> NoReturn:
        raise error

    link, x = Told(), np.ones((2, 3, 8))
    monkeypatch.setattr(dense, "agree", agree)
    with pytest.raises(type(error)):
        distributed.attention(x, x, x, link)
    assert link.errors == ([error] if is_told else [])


@pytest.mark.parametrize("place", ["_link", "_common", "record_of"])
def test_others_hear_of_an_interrupt_in_front_of_the_records(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, link, x = getattr(dense, place), Told(), np.ones((2, 3, 8))

    def interrupted(*arguments: Any) -> NoReturn:
        monkeypatch.setattr(dense, place, real)
        raise KeyboardInterrupt

    monkeypatch.setattr(dense, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        distributed.attention(x, x, x, link)
    assert link.errors if place == "record_of" else "KeyboardInterrupt" in link.record()


def test_an_interrupt_is_raised_where_others_cannot_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = [RuntimeError("ranks did not come"), KeyboardInterrupt()]

    def fails(*arguments: Any) -> NoReturn:
        raise errors.pop()

    monkeypatch.setattr(dense, "_link", fails)
    x = np.ones((2, 3, 8))
    with pytest.raises(KeyboardInterrupt):
        distributed.attention(x, x, x, Told())
    assert not errors


def test_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = np.ones((2, 3, 8))
    with pytest.raises(TypeError, match="comm is a NoneType, expected a communicator: of mpi4py"):
        distributed.attention(x, x, x, None)


def test_shard_and_unshard(rng: np.random.Generator) -> None:
    for layout in LAYOUTS:
        for length in (0, 1, 7, 24):
            x = rng.standard_normal((2, length, 3))
            parts = [shard(x, rank, 4, layout=layout) for rank in range(4)]  # type: ignore[arg-type]
            assert max(p.shape[1] for p in parts) - min(p.shape[1] for p in parts) <= 1
            np.testing.assert_array_equal(unshard(parts, layout=layout), x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout is 'round'"):
        shard(x, 0, 2, layout="round")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout is 'round'"):
        unshard([x], layout="round")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"causal": True, "query_offset": -1}])
def test_parts_go_in_one_launch(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Both ends of a sequence, where how many keys a query sees is all there is to their places."""
    num_calls = [0]
    attend = ring.attend

    def counted(*given: Any, **more: Any) -> Any:
        num_calls[0] += 1
        return attend(*given, **more)

    monkeypatch.setattr(ring, "attend", counted)
    arrays = [draw(rng, "float32", 2, 32, 8) for _ in range(3)]
    for size, num_parts in ((4, 1), (2, 2), (1, 4)):
        num_calls[0] = 0
        assert_right("float32", together(*arrays, size, "zigzag", num_parts, **options), arrays, **options)
        # of 4 parts and 4; positions that differ by one cut every end of a sequence into pieces
        assert (num_calls[0] == 16) == ("query_offset" not in options)


def test_nothing_at_all() -> None:
    for shape in ((0, 5, 8), (2, 0, 8), (0, 2, 5, 8)):
        x = np.ones(shape)
        found, _ = run_ranks(2, lambda rank, comm, x=x: distributed.attention(x, x, x, comm, causal=True))
        assert [out.shape for out in found] == [shape] * 2


def test_queries_without_keys() -> None:
    q, k = np.ones((2, 5, 8)), np.ones((2, 0, 8))
    found, _ = run_ranks(2, lambda rank, comm: distributed.attention(q, k, k, comm, return_lse=True))
    for out, lse in found:
        assert (out == 0).all() and np.isneginf(lse).all()


def test_long_errors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks tell each other has a fixed size, whatever they say."""
    x = np.ones((2, 5, 8))

    def fail(*arrays: Any, **options: Any) -> Any:
        if options["causal"]:
            raise ValueError('ä"\\' * 2000)
        return describe(*arrays, **options)

    describe = dense.describe_attention
    monkeypatch.setattr(dense, "describe_attention", fail)
    found, _ = run_ranks(2, lambda rank, comm: distributed.attention(x, x, x, comm, causal=rank == 1))
    assert str(found[0]).startswith("rank 1 raised ValueError: ?") and len(str(found[0])) < 950
    assert len(str(found[1])) == 6000


def test_numpy_arrays_do_not_go_by_nccl() -> None:
    x = np.ones((2, 5, 8))

    def call(rank: int, comm: Any) -> Any:
        comm.device = 0
        return distributed.attention(x, x, x, comm)

    for error in run_ranks(2, call)[0]:
        assert type(error) is TypeError and "q is a NumPy array, expected a GPU array" in str(error)


def test_slabs_change_nothing_but_memory(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Rows of a part that meet its keys piece by piece."""
    from cuflash.distributed import ring

    arrays = [draw(rng, "float64", 2, 90, 8) for _ in range(3)]
    monkeypatch.setattr(ring, "SCRATCH_BYTES_ON_HOST", 1)
    monkeypatch.setattr(ring, "MIN_ROWS", 7)
    found = together(*arrays, 2, "zigzag", causal=True, alibi_slopes=np.array([0.5, 0.1]))
    assert_right("float64", found, arrays, causal=True, alibi_slopes=np.array([0.5, 0.1]))


@pytest.mark.parametrize("name", OPTIONS)
def test_heads_in_groups(name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Heads that walk one after the other, and the same groups however many ranks there are."""
    from cuflash.distributed import ring

    monkeypatch.setattr(ring, "STATE_BYTES", 1)
    arrays = [draw(rng, "float32", 2, heads, n, 8) for heads, n in ((4, 64), (2, 96), (2, 96))]
    options = {key: x[..., :96] if key in ("bias", "mask") else x for key, x in OPTIONS[name].items()}
    found = [together(*arrays, size, "zigzag", 4 // size, **options) for size in (1, 2, 4)]
    assert_right("float32", found[0], arrays, **options)
    for out, lse, links in found[1:]:
        assert out.tobytes() == found[0][0].tobytes() and lse.tobytes() == found[0][1].tobytes()
        assert all(size <= 2 * 24 * 8 * 4 * 2 * 2 for link in links for _, size in link.sent), "a head at a time"


def test_groups_of_heads_take_turns_in_memory(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    from cuflash.distributed import ring

    q, k = draw(rng, "float64", 6, 40, 8), draw(rng, "float64", 3, 40, 8)
    sizes, empty_state = [], ring.empty_state
    monkeypatch.setattr(ring, "empty_state", lambda shape, *rest: sizes.append(shape) or empty_state(shape, *rest))
    for limit, expected in ((2**28, [(6, 20, 8)]), (4 * 20 * 8 * 8, [(2, 20, 8), (4, 20, 8)]), (1, [(2, 20, 8)] * 3)):
        monkeypatch.setattr(ring, "STATE_BYTES", limit)
        sizes.clear()
        into = np.empty((2, 20, 6, 8)).swapaxes(1, 2)
        run_ranks(2, lambda rank, comm, into=into: distributed.attention(
            *(shard(x, rank, 2) for x in (q, k, k)), comm, out=into[rank], sinks=np.arange(6.0)
        ))  # fmt: skip
        assert sorted(sizes) == sorted(expected * 2)
        exact, _ = reference.attention(q, k, k, sinks=np.arange(6.0))
        assert np.abs(np.concatenate(list(into), axis=1) - exact).max() < 1e-14


@pytest.mark.parametrize("offset", [10**6, 10**9, 10**12, 10**15, 2**60, -(2**60)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_alibi_of_queries_far_away(dtype: str, offset: int, rng: np.random.Generator) -> None:
    """What all keys of a row have in common is left out, and the same of all parts."""
    arrays = [draw(rng, dtype, 2, 40, 8) for _ in range(3)]
    options: dict[str, Any] = {"alibi_slopes": np.array([0.1, 0.7]), "query_offset": offset}
    out, _, _ = together(*arrays, 4, **options)
    exact = cuflash.attention(*(x.astype(np.float64) for x in arrays), **options)
    assert np.abs(out - exact).max() <= 32 * EPS[dtype]
    # Beside such logits a sink is all that is left.
    sinks = np.array([3.3, -1.7])
    _, lse, _ = together(*arrays, 4, sinks=sinks, **options)
    np.testing.assert_allclose(lse, np.repeat(sinks[:, np.newaxis], 40, axis=1), rtol=2 * EPS[dtype])


def test_error_does_not_grow_with_the_number_of_parts(rng: np.random.Generator) -> None:
    for dtype in ("float32", "float64"):
        arrays = [draw(rng, dtype, 1, 512, 16) for _ in range(3)]
        exact, _ = reference.attention(*arrays)
        errors = [np.abs(together(*arrays, 2, num_parts=n)[0] - exact).max() for n in (1, 24)]
        assert errors[1] <= 2 * errors[0] + EPS[dtype]
        ones = np.ones_like(arrays[2])
        assert np.abs(together(*arrays[:2], ones, 2, num_parts=24)[0] - 1).max() <= 4 * EPS[dtype]


def test_infinite_values_have_weight(rng: np.random.Generator) -> None:
    """However little: no weight becomes 0 in one part only because it is small beside another part's."""
    q, k, v = (draw(rng, "float64", 1, n, 8) for n in (3, 8, 8))
    v[:, 0] = np.inf
    bias = np.where(np.arange(8) == 0, -200.0, 0.0)
    assert np.isposinf(together(q, k, v, 2, bias=bias)[0]).all()


def test_options_of_gpus(rng: np.random.Generator) -> None:
    x = draw(rng, "float32", 2, 20, 8)

    def call(rank: int, comm: Any) -> Any:
        with cuflash.options(kernel="forward_mma"):
            return distributed.attention(x, x, x, comm)

    for error in run_ranks(2, call)[0]:
        assert "kernel 'forward_mma' cannot serve this call: it needs GPU arrays" in str(error)


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_results_over_a_bias(name: str) -> None:
    x = np.ones((2, 20, 8), np.float32)
    memory = np.ones((2, 20, 40), np.float32)
    pairs = memory if name == "bias" else memory.view(np.bool_)[..., :40]

    def call(rank: int, comm: Any) -> Any:
        return distributed.attention(x, x, x, comm, out=memory[..., :8], **{name: pairs})

    for error in run_ranks(2, call)[0]:
        assert type(error) is ValueError and f"out overlaps {name} in memory" in str(error)
