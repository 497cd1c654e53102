"""The case matrix: every option, layout and boundary once, and some combinations.

Each case runs in four dtypes on every row of the kernel table and on both back ends.
"""

from __future__ import annotations

from typing import Any

from cuflash.plan.axes import walked_axes
from cuflash.plan.table import Device, KernelSpec
from cuflash.problem.problem import Problem
from cuflash.testing import LAYOUTS, Cached, Case

Shape = tuple[int, ...]


def serves(spec: KernelSpec, problem: Problem, device: Device) -> bool:
    """Whether a row serves a problem. Where a launch prepares keys and values, that one has to walk all axes."""
    if spec.refusal(problem.traits, device) is not None:
        return False
    return not walked_axes(problem, False)[0] or not all(tile.prepared for tile in spec.tiles(problem.traits, device))


def _lengths() -> list[Case]:
    pairs = [(1, 1), (1, 64), (64, 1), (63, 65), (65, 63), (64, 64), (17, 200), (200, 131), (5, 0), (0, 5), (0, 0)]
    cases = [Case(f"lengths-{n}x{m}", (2, 3, n, 64), (2, 3, m, 64)) for n, m in pairs]
    cases += [Case(f"causal-{n}x{m}", (2, 2, n, 32), (2, 2, m, 32), options={"causal": True}) for n, m in pairs]
    cases += [
        Case(f"top_left-{n}x{m}", (1, 2, n, 32), (1, 2, m, 32), options={"causal": "top_left"})
        for n, m in [(200, 70), (70, 200)]
    ]
    cases.append(Case("bottom_right", (1, 2, 90, 32), (1, 2, 200, 32), options={"causal": "bottom_right"}))
    return cases


def _head_dims() -> list[Case]:
    dims = [(d, d) for d in (1, 3, 8, 17, 40, 72, 80, 96, 128, 160, 192, 256, 320, 512)]
    dims += [(64, 128), (128, 1), (1, 512), (72, 40), (192, 128), (16, 512), (80, 160)]
    return [
        Case(f"head_dim-{d}-{dv}", (1, 2, 70, d), (1, 2, 75, d), head_dim_v=dv, options={"causal": True})
        for d, dv in dims
    ]


def _heads() -> list[Case]:
    cases = []
    for heads_q, heads_kv in [(4, 2), (6, 2), (8, 1), (5, 5), (6, 3)]:
        for n, m in [(1, 200), (3, 70), (100, 90)]:
            name, shape_q, shape_k = f"heads-{heads_q}-{heads_kv}-{n}x{m}", (2, heads_q, n, 64), (2, heads_kv, m, 64)
            cases.append(Case(name, shape_q, shape_k, options={"causal": True}))
    cases += [
        Case("heads-none", (2, 0, 5, 16), (2, 0, 5, 16)),
        Case("batch-none", (0, 2, 5, 16), (0, 2, 5, 16)),
        Case("two_dimensions", (70, 32), (80, 32)),
        Case("two_dimensions-into", (70, 32), (80, 32), give_out=True),
        Case("three_dimensions", (2, 70, 32), (2, 80, 32), options={"causal": True}),
        Case("batch-broadcast-k", (3, 2, 2, 20, 16), (2, 2, 30, 16)),
        Case("batch-broadcast-both", (3, 1, 2, 20, 16), (1, 4, 2, 30, 16)),
        Case("batch-broadcast-q", (2, 20, 16), (3, 2, 30, 16)),
        Case("batch-six", (2, 1, 2, 1, 2, 2, 2, 9, 16), (1, 3, 1, 2, 1, 2, 2, 9, 16)),
    ]
    return cases


def _visibility() -> list[Case]:
    cases = []
    for left, right in [(0, 0), (3, None), (None, 2), (5, 7), (100, 0), (300, 300), (None, None)]:
        options: dict[str, Any] = {"window": (left, right)}
        cases.append(Case(f"window-{left}-{right}", (1, 2, 150, 32), (1, 2, 170, 32), options=options))
    for w in (0, 64, 130):
        options = {"window": (w, w), "causal": True}
        cases.append(Case(f"window-causal-{w}", (1, 2, 200, 32), (1, 2, 200, 32), options=options))
    for offset in (-70, -1000, 0, 5, 500, 2**40, 2**70, -(2**70)):
        options = {"causal": True, "query_offset": offset}
        cases.append(Case(f"offset-{offset}", (1, 2, 80, 32), (1, 2, 90, 32), options=options))
    options = {"query_offset": 100, "window": (20, 30)}
    cases.append(Case("offset-window", (1, 2, 80, 32), (1, 2, 300, 32), options=options))
    offsets = [("int32", (3,)), ("int64", (2, 1)), ("int8", ()), ("uint8", (2, 3)), ("uint64", (3,)), ("int16", (1, 3))]
    for dtype, shape in offsets:
        arrays: dict[str, tuple[Shape, str]] = {"query_offset": (shape, dtype)}
        shape_q, shape_k = (2, 3, 2, 70, 16), (2, 3, 2, 80, 16)
        cases.append(Case(f"offset-array-{dtype}", shape_q, shape_k, options={"causal": True}, arrays=arrays))
    return cases


def _scores() -> list[Case]:
    cases = [
        Case("scale-0", (1, 2, 70, 32), (1, 2, 80, 32), options={"scale": 0}),
        Case("scale-negative", (1, 2, 70, 32), (1, 2, 80, 32), options={"scale": -0.3, "causal": True}),
        Case("scale-large", (1, 2, 70, 32), (1, 2, 80, 32), options={"scale": 30.0}),
        Case("scale-huge", (1, 2, 70, 32), (1, 2, 80, 32), options={"scale": 1e12}),
        Case("scale-tiny", (1, 2, 70, 32), (1, 2, 80, 32), options={"scale": 1e-40, "causal": True}),
        Case("softcap", (1, 2, 70, 32), (1, 2, 80, 32), options={"softcap": 1.5, "causal": True}),
        # As long as scores are small, forward_mma caps them by a polynomial.
        *(
            Case(
                f"softcap-small-{dtype}",
                (1, 2, 70, 32),
                (1, 2, 80, 32),
                options={"softcap": 30.0, "scale": 0.02, "causal": True, "out_dtype": dtype},
            )
            for dtype in ("float16", "float32")
        ),
        Case("softcap-tiny", (1, 1, 20, 16), (1, 1, 20, 16), options={"softcap": 1e-40}),
        Case("softcap-huge", (1, 1, 20, 16), (1, 1, 20, 16), options={"softcap": 1e39}),
    ]
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        cases.append(Case(f"bias-{dtype}", (2, 3, 70, 32), (2, 3, 200, 32), arrays={"bias": ((2, 3, 70, 200), dtype)}))
    shapes: dict[str, Shape] = {"keys": (200,), "rows": (70, 1), "heads": (3, 1, 1), "batch": (2, 1, 70, 200)}
    for name, shape in (shapes | {"scalar": (), "ones": (1, 1, 1, 1)}).items():
        shape_q, shape_k, bias = (2, 3, 70, 16), (2, 3, 200, 16), (shape, "float32")
        cases.append(Case(f"bias-{name}", shape_q, shape_k, arrays={"bias": bias}, options={"causal": True}))
        cases.append(Case(f"mask-{name}", shape_q, shape_k, arrays={"mask": (shape, "bool")}))
    odd: dict[str, tuple[Shape, str]] = {"bias": ((73, 199), "float16"), "mask": ((73, 199), "bool")}
    cases.append(Case("bias-mask-odd", (1, 2, 73, 32), (1, 2, 199, 32), arrays=odd))
    for dtype, shape in [("float16", (4,)), ("float32", (2, 4)), ("bfloat16", (2, 1)), ("float64", ())]:
        cases.append(Case(f"alibi-{dtype}", (2, 4, 70, 32), (2, 2, 90, 32), arrays={"alibi_slopes": (shape, dtype)}))
        sinks = {"sinks": (shape, dtype)}
        cases.append(Case(f"sinks-{dtype}", (2, 4, 70, 32), (2, 2, 60, 32), arrays=sinks, options={"causal": True}))
    cases.append(Case("sinks-no-keys", (2, 4, 7, 32), (2, 2, 0, 32), arrays={"sinks": ((4,), "float32")}))
    cases.append(Case("mean", (1, 2, 64, 64), (1, 2, 3000, 64), value_mean=1.0))
    cases += [Case(f"keys-{n}", (1, 1, 20, 16), (1, 1, n, 16), value_mean=1.0) for n in (4090, 8192, 9000)]
    return cases


def _memory() -> list[Case]:
    cases = []
    for layout in LAYOUTS:
        cases.append(Case(f"layout-{layout}", (2, 4, 70, 40), (2, 2, 90, 40), options={"causal": True}, layout=layout))
        if layout != "broadcast":
            cases.append(Case(f"layout-{layout}-into", (2, 4, 70, 64), (2, 2, 90, 64), layout=layout, give_out=True))
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        cases.append(Case(f"out_dtype-{dtype}", (1, 2, 70, 32), (1, 2, 80, 32), options={"out_dtype": dtype}))
    wider = {"out_dtype": "float64"}
    cases.append(Case("out_dtype-odd", (1, 2, 70, 17), (1, 2, 80, 17), options={"out_dtype": "float32"}))
    cases.append(Case("out_dtype-into", (1, 2, 70, 24), (1, 2, 80, 24), options=wider, give_out=True))
    return cases


def _packed() -> list[Case]:
    boundaries = {
        "plain": ((0, 70, 75, 200), (0, 90, 91, 230)),
        "empty": ((0, 0, 70, 70, 71, 71), (0, 5, 5, 80, 80, 200)),
        "tail": ((0, 64, 128), (0, 100, 130)),
        "none": ((0,), (0,)),
        "many": (tuple(range(0, 300, 2)), tuple(range(0, 450, 3))),
    }
    cases = []
    for name, (q, k) in boundaries.items():
        total_q, total_k = q[-1] + (9 if name in ("tail", "none") else 0), k[-1] + (11 if name == "tail" else 0)
        for causal in (False, True):
            shape_q, shape_k = (total_q, 4, 32), (total_k, 2, 32)
            cases.append(
                Case(f"packed-{name}-{causal}", shape_q, shape_k, cu_seqlens=(q, k), options={"causal": causal})
            )
    q, k = boundaries["plain"]
    variants: list[tuple[str, dict[str, Any]]] = [
        ("window", {"window": (20, 3)}),
        ("top_left", {"causal": "top_left", "window": (30, None)}),
        ("softcap", {"softcap": 2.0, "scale": 0.4, "max_seqlen_q": 3}),
    ]
    for name, options in variants:
        cases.append(Case(f"packed-{name}", (200, 4, 64), (230, 2, 64), cu_seqlens=(q, k), options=options))
    arrays: dict[str, tuple[Shape, str]] = {"alibi_slopes": ((3, 4), "float32"), "sinks": ((4,), "float32")}
    causal_only = {"causal": True}
    return [
        *cases,
        Case("packed-alibi-sinks", (200, 4, 40), (230, 1, 40), None, causal_only, arrays, cu_seqlens=(q, k)),
        Case("packed-into", (209, 4, 72), (230, 4, 72), 40, cu_seqlens=(q, k), give_out=True, layout="gaps"),
        Case("packed-swapped", (200, 4, 32), (230, 4, 32), cu_seqlens=(q, k), layout="swapped"),
    ]


def _combined() -> list[Case]:
    everything: dict[str, tuple[Shape, str]] = {
        "bias": ((4, 1, 200), "float32"),
        "mask": ((2, 1, 70, 200), "bool"),
        "alibi_slopes": ((4,), "float32"),
        "sinks": ((2, 4), "float32"),
        "query_offset": ((2,), "int32"),
    }
    few_rows: dict[str, tuple[Shape, str]] = {"mask": ((2, 1, 3, 200), "bool")}
    options = {"causal": True, "window": (90, 5), "softcap": 3.0, "scale": -0.2}
    return [
        Case("everything", (2, 4, 70, 72), (2, 2, 200, 72), 40, options, everything),
        Case("everything-few_rows", (2, 4, 3, 64), (2, 2, 200, 64), None, options, everything | few_rows),
        Case(
            "everything-strided", (2, 4, 70, 72), (2, 2, 200, 72), None, options, everything, "swapped", give_out=True
        ),
    ]


def _wide() -> list[Case]:
    """Head dimensions for which warps share their rows, over several tiles of keys."""
    everything: dict[str, tuple[Shape, str]] = {
        "bias": ((1, 140, 200), "float32"),
        "mask": ((140, 200), "bool"),
        "alibi_slopes": ((2,), "float32"),
        "sinks": ((2,), "float32"),
    }
    options = {"causal": True, "window": (90, 5), "softcap": 3.0, "scale": -0.2}
    boundaries = ((0, 70, 75, 200), (0, 90, 91, 230))
    return [
        Case("wide-causal", (1, 2, 140, 256), (1, 1, 200, 256), options={"causal": True}),
        Case("wide-window", (1, 1, 140, 512), (1, 1, 170, 512), options={"window": (40, 20)}),
        Case("wide-window-160", (1, 1, 140, 160), (1, 1, 170, 160), options={"window": (10, 10)}),
        Case("wide-everything", (1, 2, 140, 256), (1, 1, 200, 256), 200, options, everything),
        Case("wide-packed", (200, 2, 160), (230, 1, 160), cu_seqlens=boundaries, options={"causal": True}),
        Case("wide-keys-4200", (1, 1, 20, 160), (1, 1, 4200, 160), value_mean=1.0),
    ]


def _cached() -> list[Case]:
    """Caches: lengths of all kinds, new keys that there is room for and not, pages of all sizes."""
    ragged = (0, 5, 130)
    shape_q, shape_k = (3, 4, 3, 64), (3, 2, 140, 64)
    causal: dict[str, Any] = {"causal": True}
    cases = [
        Case("cache-plain", shape_q, shape_k, cached=Cached(ragged)),
        Case("cache-int", shape_q, shape_k, options=causal, cached=Cached(70, 3)),
        Case("cache-int-full", shape_q, shape_k, cached=Cached(138, 3)),
        Case("cache-one", (3, 4, 1, 64), shape_k, options=causal, cached=Cached(ragged, 1)),
        Case("cache-one-head", (3, 8, 1, 40), (3, 1, 140, 40), 24, causal, cached=Cached((1, 64, 139), 1)),
        Case("cache-no-room", shape_q, shape_k, options=causal, cached=Cached((0, 138, 500), 6)),
        Case("cache-prompt", (3, 4, 70, 64), shape_k, options=causal, cached=Cached((0, 5, 70), 70)),
        Case(
            "cache-splits",
            (3, 4, 3, 64),
            (3, 2, 900, 64),
            None,
            causal | {"num_splits": 3},
            cached=Cached((0, 65, 890), 3),
        ),
        Case("cache-wide", (2, 2, 3, 256), (2, 1, 140, 256), options=causal, cached=Cached((20, 130), 3)),
        Case("cache-uneven", (2, 2, 3, 192), (2, 1, 140, 192), 128, causal, cached=Cached((20, 130), 3)),
        Case("cache-top_left", (3, 4, 70, 64), shape_k, options={"causal": "top_left"}, cached=Cached(ragged)),
        Case("cache-no-batch", (0, 4, 3, 64), (0, 2, 140, 64), cached=Cached((), 3)),
        Case("cache-no-queries", (3, 4, 0, 64), shape_k, cached=Cached(ragged, 3)),
        Case("cache-no-keys", shape_q, (3, 2, 0, 64), cached=Cached(ragged, 3)),
    ]
    for layout in LAYOUTS:
        if layout != "broadcast":
            cases.append(
                Case(f"cache-{layout}", shape_q, shape_k, 40, causal, {}, layout, True, cached=Cached(ragged, 3))
            )
    everything: dict[str, tuple[Shape, str]] = {
        "bias": ((4, 1, 140), "float32"),
        "mask": ((3, 1, 3, 140), "bool"),
        "alibi_slopes": ((4,), "float32"),
        "sinks": ((3, 4), "float32"),
    }
    options = {"causal": True, "window": (90, 5), "softcap": 3.0, "scale": -0.2}
    cases.append(Case("cache-everything", shape_q, shape_k, None, options, everything, cached=Cached(ragged, 3)))
    # With pages: the same again.
    sizes = {"plain": 16, "int": 7, "one": 64, "one-head": 1, "no-room": 20, "prompt": 16, "splits": 16, "wide": 10}
    sizes |= {"uneven": 35, "no-batch": 16, "no-queries": 16, "no-keys": 16, "everything": 28}
    sizes |= {layout: 20 for layout in LAYOUTS if layout != "broadcast"}
    by_name = {case.name.removeprefix("cache-"): case for case in cases}
    for name, page_size in sizes.items():
        case = by_name[name]
        assert case.cached is not None, "all are"
        capacity = -(-case.shape_k[2] // page_size) * page_size
        assert capacity == case.shape_k[2] or name not in ("no-room", "everything")
        shape_k = (*case.shape_k[:2], capacity, case.shape_k[3])
        cached = case.cached._replace(page_size=page_size)
        cases.append(case._replace(name=f"paged-{name}", shape_k=shape_k, cached=cached))
    return cases


def _alone(cases: list[Case]) -> list[Case]:
    """The lse alone, without values: `attention_lse`."""
    names = (
        "lengths-1x1", "lengths-63x65", "lengths-5x0", "lengths-0x5", "causal-65x63", "causal-200x131",
        "top_left-200x70", "head_dim-1-1", "head_dim-17-17", "head_dim-80-80", "head_dim-128-128", "head_dim-256-256",
        "head_dim-512-512", "heads-8-1-3x70", "heads-6-2-100x90", "heads-none", "two_dimensions", "two_dimensions-into",
        "batch-broadcast-both", "batch-six", "window-100-0", "window-5-7", "offset--1000", "offset-array-int64",
        "scale-negative", "scale-huge", "softcap", "softcap-small-float16", "bias-float16", "bias-rows", "mask-keys",
        "bias-mask-odd", "alibi-float32", "sinks-float32", "sinks-no-keys", "keys-9000", "layout-swapped-into",
        "layout-transposed-into", "layout-reversed-into", "layout-every_second-into", "layout-odd_bytes-into",
        "layout-broadcast", "everything", "everything-few_rows", "everything-strided",
    )  # fmt: skip
    alone = []
    for case in cases:
        if case.name in names:
            options = {name: value for name, value in case.options.items() if name != "out_dtype"}
            alone.append(case._replace(name=f"lse-{case.name}", head_dim_v=0, options=options))
    return alone


_WITH_VALUES = [
    *_lengths(),
    *_head_dims(),
    *_heads(),
    *_visibility(),
    *_scores(),
    *_memory(),
    *_packed(),
    *_combined(),
    *_wide(),
    *_cached(),
]
CASES = [*_WITH_VALUES, *_alone(_WITH_VALUES)]
CASES_BY_NAME = {case.name: case for case in CASES}


def fitting(case: Case, spec: KernelSpec) -> Case:
    """The case itself or, for a row that takes few features alone, the same with fewer."""
    widest = spec.max_head_dim
    if widest > 128:
        return case

    def narrowed(features: int) -> int:
        return (features - 1) % widest + 1

    shape_q, shape_k = ((*shape[:-1], narrowed(shape[-1])) for shape in (case.shape_q, case.shape_k))
    head_dim_v = None if case.head_dim_v is None else narrowed(case.head_dim_v)
    return case._replace(shape_q=shape_q, shape_k=shape_k, head_dim_v=head_dim_v)


DTYPES = ("float16", "bfloat16", "float32", "float64")

_TF32 = (
    "lengths-63x65", "causal-200x131", "everything", "packed-plain-True", "head_dim-160-160", "head_dim-17-17", "mean",
    "keys-9000", "layout-gaps-into", "heads-6-2-100x90", "sinks-float32",
)  # fmt: skip
TF32_CASES = [case._replace(options={**case.options, "precision": "tf32"}) for case in CASES if case.name in _TF32]
"""For float32 alone."""
