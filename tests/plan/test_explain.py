"""`explain` and `warmup`: what a call would do, without doing it."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cuflash
import cuflash.plan.build
import cuflash.plan.plan
from cuflash import attention, attention_varlen, attention_with_kv_cache, explain, options, warmup
from cuflash.__main__ import main
from cuflash.gpu import installed
from cuflash.gpu.compile import KernelCompileError, compile_offline, source_digest
from cuflash.plan.plan import Plan, make_plan
from cuflash.plan.table import KERNELS, device_of
from cuflash.problem.describe import describe_attention
from cuflash.settings import AUTOMATIC, Settings

# The function of the same name hides the module from ordinary imports.
explain_module = sys.modules["cuflash.explain"]


class StandIn:
    """A description of an array."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.float16, strides: tuple[int, ...] | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        if strides is not None:
            self.strides = strides


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def test_numpy_arrays() -> None:
    x = zeros(2, 5, 8)
    explanation = explain(attention, x, x, x, causal=True, return_lse=True)
    assert explanation.kernel == "cpu" and explanation.device is None and explanation.plan is None
    assert explanation.problem == describe_attention(x, x, x, causal=True, return_lse=True)[0]
    assert (explanation.tile, explanation.source, explanation.workspace, explanation.refusals) == ("", "", 0, ())
    assert str(explanation).splitlines()[0] == str(explanation.problem)
    assert re.search(r"kernel +cpu: NumPy arrays are computed on the CPU, \d+ threads", str(explanation))


def test_numpy_arrays_of_varlen() -> None:
    x = zeros(9, 2, 8)
    explanation = explain(attention_varlen, x, x, x, np.array([0, 4, 9]))
    assert explanation.kernel == "cpu" and explanation.problem.traits.op == "attention_varlen"


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("capability", [61, 75, 80, 90, 120])
@pytest.mark.parametrize("make", [StandIn, np.zeros], ids=["stand-ins", "NumPy"])
def test_a_device_that_is_not_here(capability: int, make: Callable[..., Any]) -> None:
    x = make((1, 16, 4096, 64), np.float16)
    explanation = explain(attention, x, x, x, causal=True, device=capability)
    device = device_of(capability)
    plan = make_plan(explanation.problem, device, AUTOMATIC)
    assert (explanation.device, explanation.plan) == (device, plan)
    assert (explanation.kernel, explanation.tile) == (plan.kernel, str(plan.tile))
    assert (explanation.num_blocks, explanation.num_threads) == (plan.num_blocks, plan.tile.num_threads)
    assert (explanation.shared_memory, explanation.workspace) == (plan.program.shared_memory, plan.workspace)
    assert (explanation.registers, explanation.spill_bytes) == (None, None)
    text = str(explanation)
    for part in (
        plan.kernel,
        f"sm_{capability}",
        f"{plan.tile} (rows x keys), {plan.tile.num_threads} threads",
        f"{plan.num_blocks} blocks",
        f"{plan.program.shared_memory} of {device.shared_memory_per_block} bytes",
        f"unknown (no NVRTC here that compiles for sm_{capability})",
        "workspace      0 bytes",
    ):
        assert part in text
    assert "#define CUFLASH_HEAD_DIM 64\n" in explanation.source and source_digest() in explanation.source


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("capability", [61, 75, 80, 90])
@pytest.mark.parametrize("seqlen_q", [1, 4096])
def test_predictions_say_why_it_is_this_tile(seqlen_q: int, capability: int, dtype: Any) -> None:
    """They are what the plan is made of, of all tiles that may serve the call."""
    q, k = StandIn((2, 8, seqlen_q, 64), dtype), StandIn((2, 8, 4096, 64), dtype)
    found = explain(attention, q, k, k, device=capability)
    assert isinstance(found.plan, Plan)
    best, *others = found.predictions
    assert (best.kernel, best.tile, best.num_splits) == (found.kernel, found.tile, found.plan.num_splits)
    assert others and [best.time, *(one.time for one in others)] == sorted(one.time for one in found.predictions)
    times = {(one.kernel, one.tile): one for one in found.predictions}
    assert len(times) == len(found.predictions)
    for one in others:
        plan = make_plan(found.problem, device_of(capability), Settings(one.kernel, one.tile, False))
        assert (str(plan.tile), plan.num_splits) == (one.tile, one.num_splits)
    splits = f" of {best.num_splits} splits" if best.num_splits > 1 else ""
    assert re.search(rf"\n  time model     {best.tile}{splits} [\d.]+ us, ", str(found))


def test_registers_of_nothing_that_is_launched() -> None:
    q, k = StandIn((0, 8, 100, 64)), StandIn((0, 8, 100, 64))
    assert "\n  registers      none: nothing is launched\n" in str(explain(attention, q, k, k, device=90))


def test_source_that_does_not_compile_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is no lack of a compiler."""

    def refuse(program: Any, arch: str) -> Any:
        raise KernelCompileError("expected a ';'")

    monkeypatch.setattr(explain_module, "compiles_for", lambda arch: True)
    monkeypatch.setattr(explain_module, "_compiled_resources", refuse)
    x = StandIn((2, 8, 100, 64))
    with pytest.raises(KernelCompileError, match="expected a ';'"):
        explain(attention, x, x, x, device=90)
    assert main(["explain", "--q", "2,8,100,64", "--device", "90"]) == 1
    assert capsys.readouterr().err == "KernelCompileError: expected a ';'\n"


def test_nothing_is_predicted_where_nothing_is_weighed() -> None:
    """Splits of the caller's, and no rows."""
    q, cache = StandIn((2, 8, 1, 64), np.float16), StandIn((2, 8, 4096, 64), np.float16)
    for chosen in ({"num_splits": 4}, {"split_size": 512}):
        assert explain(attention_with_kv_cache, q, cache, cache, seqlens_k=4000, device=90, **chosen).predictions == ()
    none = StandIn((2, 0, 16, 64), np.float16)
    found = explain(attention, none, none, none, device=90)
    assert found.predictions == () and "time model" not in str(found)


@pytest.mark.usefixtures("no_compiler")
def test_stand_ins_mean_what_arrays_mean() -> None:
    real = zeros(4, 5, 12, dtype=np.float16)[:, ::2, :8]
    described = StandIn(real.shape, "float16", real.strides)
    bias, mask = zeros(3, 3), zeros(3, 3, dtype=bool)
    for chosen in (
        {},
        {"bias": bias, "mask": mask, "sinks": zeros(4), "alibi_slopes": zeros(4), "out_dtype": "float32"},
        {"window": (3, None), "softcap": 5, "scale": 2, "query_offset": 3},
        {"query_offset": np.int64(3)},
        {"query_offset": np.array(3)},
    ):
        expected = describe_attention(real, real, real, **chosen)[0]
        described_options = {
            name: StandIn(x.shape, x.dtype, x.strides) if isinstance(x, np.ndarray) else x for name, x in chosen.items()
        }
        assert explain(attention, real, real, real, device=90, **chosen).problem == expected
        assert explain(attention, described, described, described, device=90, **described_options).problem == expected


@pytest.mark.usefixtures("no_gpu")
def test_stand_ins_without_a_gpu_are_taken_as_numpys() -> None:
    x = StandIn((2, 5, 8), ml_dtypes.bfloat16)
    assert explain(attention, x, x, x).kernel == "cpu"
    packed = StandIn((9, 2, 8))
    assert explain(attention_varlen, packed, packed, packed, StandIn((3,), np.int32)).kernel == "cpu"
    assert explain(attention, zeros(2, 5, 8, dtype=np.float16), StandIn((2, 5, 8)), StandIn((2, 5, 8))).kernel == "cpu"


@pytest.mark.usefixtures("no_compiler")
def test_varlen_stand_ins() -> None:
    x = StandIn((100, 4, 64))
    explanation = explain(attention_varlen, x, x, x, StandIn((4,), np.int32), causal=True, device=90)
    assert explanation.problem.batch == (3,) and explanation.plan is not None
    assert dict(explanation.plan.program.macros)["VARLEN"] == 1


@pytest.mark.usefixtures("no_compiler")
def test_reasons_of_faster_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    last = KERNELS[-1]
    narrow = last._replace(name="narrow", dtypes=("float16",))
    narrower = narrow._replace(name="narrower", max_head_dim=32)
    for module in (cuflash.plan.build, cuflash.plan.plan):
        monkeypatch.setattr(module, "KERNELS", (narrower, narrow, last))
    monkeypatch.setattr(cuflash.plan.build, "_builds", {})
    x = StandIn((4, 5, 64), np.float32)
    explanation = explain(attention, x, x, x, device=90)
    assert explanation.kernel == last.name
    assert explanation.refusals == (
        ("narrower", "dtype float32 is not one of float16"),
        ("narrow", "dtype float32 is not one of float16"),
    )
    assert "  not narrow: dtype float32 is not one of float16" in str(explanation).splitlines()
    x = StandIn((4, 5, 64), np.float16)
    explanation = explain(attention, x, x, x, device=90)
    assert (explanation.kernel, explanation.refusals) == ("narrow", (("narrower", "head_dim 64 is above 32"),))
    with options(kernel=last.name):
        assert explain(attention, x, x, x, device=90).refusals[1] == ("narrow", "options(kernel=...) chose another")


@pytest.mark.usefixtures("no_compiler")
def test_reasons_beside_a_split_size() -> None:
    q, cache = StandIn((2, 8, 1, 64), np.float16), StandIn((2, 2, 5000, 64), np.float16)
    found = explain(attention_with_kv_cache, q, cache, cache, seqlens_k=5000, split_size=1024, device=90)
    assert found.kernel == "forward_decode"
    assert dict(found.refusals)["forward_mma"] == "its bits of a row depend on other rows, and split_size is given"


@pytest.mark.usefixtures("no_compiler")
def test_options_choose() -> None:
    x = StandIn((4, 500, 64), np.float32)
    with options(tile="32x32"):
        assert explain(attention, x, x, x, device=90).tile == "32x32"
    with options(tile="63x64"), pytest.raises(ValueError, match="tile '63x64' cannot serve this call"):
        explain(attention, x, x, x, device=90)
    with options(kernel="cpu"), pytest.raises(ValueError, match="kernel 'cpu' cannot serve this call"):
        explain(attention, x, x, x, device=90)


@pytest.mark.parametrize("capability", [75, 90, 120])
def test_registers_come_from_the_compiler(capability: int) -> None:
    pytest.importorskip("cupy")
    x = StandIn((4, 500, 64), np.float32)
    explanation = explain(attention, x, x, x, device=capability)
    assert explanation.plan is not None
    resources = compile_offline(explanation.plan.program, f"sm_{capability}")
    assert (explanation.registers, explanation.spill_bytes) == (resources.registers, resources.spill_bytes)
    assert 16 <= resources.registers <= 255
    assert f"{resources.registers} per thread, {resources.spill_bytes} bytes spilled" in str(explanation)


def test_nothing_to_launch_asks_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_module, "compile_offline", None)
    x = StandIn((4, 0, 64))
    explanation = explain(attention, x, x, x, device=90)
    assert (explanation.num_blocks, explanation.registers) == (0, None)


Q = zeros(2, 5, 8)


@pytest.mark.parametrize("capability", [None, 90])
@pytest.mark.parametrize(
    "changes",
    [
        {"q": [[1.0]]},
        {"q": None},
        {"k": np.ma.zeros((2, 5, 8), np.float32)},
        {"k": zeros(2, 5, 9)},
        {"k": zeros(2, 5, 8, dtype=np.float16)},
        {"v": Q.astype(Q.dtype.newbyteorder())},
        {"v": np.float32(1)},
        {"bias": zeros(6)},
        {"bias": np.float32(0)},
        {"mask": zeros(5)},
        {"sinks": zeros(3)},
        {"query_offset": 1.5},
        {"query_offset": np.float64(1)},
        {"query_offset": np.zeros(3, np.int64)},
        {"window": 3},
        {"softcap": 0},
        {"scale": np.nan},
        {"causal": "yes"},
        {"precision": "fp8"},
        {"out": zeros(2, 5, 9)},
        {"out": Q},
        {"out": np.broadcast_to(zeros(8), (2, 5, 8))},
        {"out_dtype": int},
        {"lse": zeros(2, 5, dtype=np.float16)},
        {"bogus": 1},
        {"is_causal": True},
    ],
    ids=lambda changes: "-".join(f"{name}-{type(x).__name__}" for name, x in changes.items()),
)
def test_errors_are_those_of_the_call(changes: dict[str, Any], capability: int | None) -> None:
    arguments = {"q": Q, "k": zeros(2, 5, 8), "v": zeros(2, 5, 8), **changes}
    with pytest.raises((TypeError, ValueError)) as expected:
        attention(**arguments)
    with pytest.raises(expected.type) as found:
        explain(attention, device=capability, **arguments)
    assert str(found.value) == str(expected.value)
    if capability is None:
        with pytest.raises(expected.type):
            warmup(attention, **arguments)


@pytest.mark.parametrize("choice", [{"kernel": "forward_scalar"}, {"tile": "64x64"}], ids=str)
def test_refused_choices_are_those_of_the_call(choice: dict[str, str]) -> None:
    with options(**choice):
        with pytest.raises(ValueError, match="cannot serve this call") as expected:
            attention(Q, Q, Q)
        with pytest.raises(ValueError, match=re.escape(str(expected.value))):
            explain(attention, Q, Q, Q)


@pytest.mark.parametrize("capability", [None, 90])
def test_varlen_errors_are_those_of_the_call(capability: int | None) -> None:
    x = zeros(9, 2, 8)
    for wrong in ([0, 9], np.zeros(0, int), np.zeros((2, 2), int), np.zeros(3)):
        with pytest.raises((TypeError, ValueError)) as expected:
            attention_varlen(x, x, x, wrong)
        with pytest.raises(expected.type, match=re.escape(str(expected.value))):
            explain(attention_varlen, x, x, x, wrong, device=capability)


@pytest.mark.parametrize("wrong", [9.0, "sm_90", "9.0", "", "-90", True, 9, "9", -90, 1000, (9, 0)])
def test_device_is_a_compute_capability(wrong: Any) -> None:
    words = r"device is .*, expected a compute capability: an int such as 90 for 9\.0, at least 50"
    with pytest.raises((TypeError, ValueError), match=words):
        explain(attention, Q, Q, Q, device=wrong)


@pytest.mark.parametrize("device", [np.int32(90), np.uint8(90), np.array(90), "90"])
def test_device_as_other_libraries_have_it(device: Any) -> None:
    found = explain(attention, Q, Q, Q, device=device).device
    assert found == explain(attention, Q, Q, Q, device=90).device and type(found.compute_capability) is int


@pytest.mark.parametrize("wrong", [None, "attention", np.matmul, print])
@pytest.mark.parametrize("function", [explain, warmup])
def test_function_is_one_of_ours(function: Callable[..., Any], wrong: Any) -> None:
    with pytest.raises(
        TypeError,
        match=r"function is .*, expected cuflash\.attention, attention_lse, attention_varlen, .* or recurrent_",
    ):
        function(wrong, Q, Q, Q)


@pytest.mark.parametrize("called", [explain, warmup])
def test_a_forgotten_function_is_named_and_no_array_printed(called: Callable[..., Any]) -> None:
    words = (
        "function is a ndarray of shape (2, 5, 8), expected cuflash.attention, attention_lse, attention_varlen, "
        "attention_with_kv_cache, "
        "chunk_gated_delta_rule, chunk_gated_output or recurrent_gated_delta_rule, "
        f"before the arguments of the call: {called.__name__}(cuflash.attention, q, k, v, ...)"
    )
    with pytest.raises(TypeError, match=re.escape(words) + "$"):
        called(Q, Q, Q)


@pytest.mark.usefixtures("no_compiler")
def test_heads_that_kernels_cannot_count() -> None:
    most, more = StandIn((2**31 - 1, 1, 1)), StandIn((2**31, 1, 1))
    assert explain(attention, most, most, most, device=90).num_blocks > 0
    one = StandIn((1, 1, 1))
    tokens, token = StandIn((1, 2**31, 1)), StandIn((1, 1, 1))
    boundaries = StandIn((2,), np.int32)
    for call in ((attention, more, one, one), (attention, more, more, more), (attention_varlen, tokens, token, token)):
        more_arguments = (boundaries,) if call[0] is attention_varlen else ()
        with pytest.raises(ValueError, match=r"^q has 2147483648 heads, expected at most 2147483647 on a GPU$"):
            explain(*call, *more_arguments, device=90)


@pytest.mark.usefixtures("no_compiler")
def test_queries_that_kernels_cannot_count() -> None:
    """In one head, or in a group whose heads share tiles."""
    key, packed_key, boundaries = StandIn((1, 9, 1)), StandIn((9, 1, 1)), StandIn((2,), np.int32)
    for num_queries, is_right in ((2**31 - 1, True), (2**31, False)):
        q, tokens = StandIn((1, num_queries, 1)), StandIn((num_queries, 1, 1))
        for call in ((attention, q, key, key), (attention_varlen, tokens, packed_key, packed_key, boundaries)):
            if is_right:
                assert explain(*call, device=90).num_blocks > 0
                continue
            with pytest.raises(ValueError, match=r"^q has 2147483648 queries, expected at most 2147483647 on a GPU$"):
                explain(*call, device=90)


@pytest.mark.usefixtures("no_gpu")
def test_numpy_counts_any_number_of_heads() -> None:
    more = StandIn((2**31, 1, 1))
    assert explain(attention, more, more, more).problem.num_heads_q == 2**31


def test_missing_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="'v'"):
        explain(attention, Q, Q)


def test_explanation_is_frozen() -> None:
    explanation = explain(attention, Q, Q, Q)
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.kernel = "other"  # type: ignore[misc]
    assert explanation == explain(attention, Q, Q, Q)
    assert isinstance(explanation, cuflash.Explanation)


def test_explain_writes_nothing() -> None:
    out = np.full((2, 5, 8), 7, np.float32)
    explain(attention, Q, Q, Q, out=out)
    assert (out == 7).all()


def test_torch_tensors_cannot_be_described() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 5, 8)
    with pytest.raises(TypeError, match=r"q is a stand-in that NumPy cannot read: .*torch\.float32"):
        explain(attention, x, x, x, device=90)


@pytest.mark.usefixtures("no_gpu")
def test_warmup_has_nothing_to_do_for_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain_module, "kernel_function", None)
    assert warmup(attention, Q, Q, Q, causal=True) is None
    x = StandIn((2, 5, 8))
    assert warmup(attention, x, x, x) is None
    packed = zeros(9, 2, 8)
    assert warmup(attention_varlen, packed, packed, packed, np.array([0, 9])) is None


@pytest.mark.gpu
def test_gpu_arrays_and_stand_ins_agree() -> None:
    import cupy

    x, described = cupy.zeros((2, 5, 8), np.float32), StandIn((2, 5, 8), np.float32)
    explanation = explain(attention, x, x, x)
    assert explanation == explain(attention, described, described, described)
    capability = int(x.device.compute_capability)
    assert explanation.device is not None and explanation.device.compute_capability == capability
    assert explain(attention, Q, Q, Q).kernel == "cpu"


@pytest.mark.gpu
def test_warmup_compiles_once_and_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from cuflash.gpu import compile as compile_module

    built = []
    build = compile_module._build
    monkeypatch.setattr(compile_module, "_functions", {})
    monkeypatch.setattr(compile_module, "_build", lambda plan, device: built.append(plan) or build(plan, device))
    x = cupy.zeros((2, 5, 8), np.float32)
    monkeypatch.setattr(cupy, "empty", None)
    warmup(attention, x, x, x)
    warmup(attention, x, x, x)
    warmup(attention, *(StandIn((2, 5, 8), np.float32),) * 3)
    assert len(built) == 1
    few, many = StandIn((1, 8, 1, 64), np.float32), StandIn((1, 8, 99999, 64), np.float32)
    warmup(attention, few, many, many)
    assert [plan.kernel for plan in built[2:]] == ["merge"], "splits are joined by a kernel of their own"


def test_gpu_available_survives_a_broken_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "driver_installed", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert installed.gpu_available() is False


def test_a_call_without_values() -> None:
    q = np.empty((1, 8, 4, 64), np.float32)
    k = np.empty((1, 8, 50_000, 64), np.float32)
    found = explain(cuflash.attention_lse, q, k, causal=True, device=90)
    assert found.plan is not None and found.workspace == found.plan.num_splits * 8 * 4 * 3 * 4 > 0
    macros = dict(found.plan.program.macros)
    assert macros["HEAD_DIM_V"] == 0 and found.spill_bytes in (None, 0)
    assert str(found).startswith("attention_lse float32, batch 1, heads 8/8, 4 x 50000, head_dim 64, ")
    out = np.empty((1, 8, 4), np.float32)
    assert explain(cuflash.attention_lse, q, k, out=out, device=90).plan is not None
    with pytest.raises(ValueError, match=r"out has shape \(1, 8, 4, 64\), expected \(1, 8, 4\)"):
        explain(cuflash.attention_lse, q, k, out=q, device=90)


def test_more_new_keys_than_a_grid_has_blocks_for_are_refused() -> None:
    def new(tokens: int) -> StandIn:
        return StandIn((64, 64, tokens, 1), "float16")

    def explained(tokens: int) -> Any:
        caches = new(1), new(2**20), new(2**20)
        return cuflash.explain(
            cuflash.attention_with_kv_cache, *caches, seqlens_k=0, k_new=new(tokens), v_new=new(tokens), device=90
        )

    assert explained(2**20 - 1).plan is not None
    with pytest.raises(ValueError, match=r"k_new has 4294967296 keys in .*, expected at most 4294967294 on a GPU"):
        explained(2**20)


def test_more_pages_and_keys_in_them_than_kernels_count_are_refused() -> None:
    def explained(num_pages: int, page_size: int, max_pages: int, device: Any = 90) -> Any:
        pages = StandIn((num_pages, 1, page_size, 1), "float16")
        table = StandIn((1, max_pages), "int32")
        q = StandIn((1, 1, 1, 1), "float16")
        function = cuflash.attention_with_kv_cache
        return cuflash.explain(function, q, pages, pages, seqlens_k=1, page_table=table, device=device)

    most = 2**31 - 1
    assert explained(most, 1, most).plan is not None
    with pytest.raises(ValueError, match=r"^k_cache has 2147483648 pages, expected at most 2147483647 on a GPU$"):
        explained(most + 1, 1, 1)
    expected = r"^page_table has room for 2147483648 keys of a batch, expected at most 2147483647 on a GPU$"
    with pytest.raises(ValueError, match=expected):
        explained(1, 2**16, 2**15)
    assert explained(0, 16, 0).plan is not None
    with pytest.raises(ValueError, match=r"^k_cache has no pages but page_table has 4 of each batch$"):
        explained(0, 16, 4)


def test_appended_keys_and_pages_are_named() -> None:
    x = {name: np.empty(shape, np.float16) for name, shape in (("q", (2, 8, 1, 64)), ("new", (2, 2, 1, 64)))}
    pages, lengths = [np.empty((90, 2, 16, 64), np.float16) for _ in range(2)], np.zeros(2, np.int32)
    options = {"seqlens_k": lengths, "page_table": np.zeros((2, 40), np.int32), "k_new": x["new"], "v_new": x["new"]}
    found = cuflash.explain(cuflash.attention_with_kv_cache, x["q"], *pages, device=90, **options)
    assert found.kernel == "forward_wgmma" and "90 pages of 16, 1 new, seqlens_k" in str(found)
    assert "new keys are appended first, by append_keys\n" in str(found)
    wide, options = [y.astype(np.float32) for y in (x["q"], *pages)], {**options, "k_new": None, "v_new": None}
    found = cuflash.explain(cuflash.attention_with_kv_cache, *wide, device=90, **options)
    assert dict(found.refusals)["precise_float32"] == "does not implement page_table"


def test_too_many_positional_arguments_are_explained_as_by_the_call() -> None:
    x = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(TypeError, match=r"attention\(\) takes 3 positional arguments .* but 4 were given; name"):
        explain(attention, x, x, x, 1)
