"""The features of a call: which kernels have them, and what a build is told of them."""

from __future__ import annotations

from ..problem.problem import Traits

Macros = tuple[tuple[str, str | int], ...]

_NAMES = (
    "window", "softcap", "bias", "mask", "alibi_slopes", "sinks", "query_offset", "seqlens_k", "page_table",
)  # fmt: skip
FEATURES = frozenset({*_NAMES, "out_dtype"})
"""Optional arguments that a kernel may lack; `Traits` have their names, too."""


def used_features(traits: Traits) -> list[str]:
    """Names of the features that such problems need."""
    names = [name for name in _NAMES if getattr(traits, name)]
    return names if traits.out_dtype == traits.dtype else [*names, "out_dtype"]


def feature_macros(traits: Traits, caps_by_polynomial: bool) -> Macros:
    """Macros of features that cost something where they are not used."""
    return (
        ("BIAS_DTYPE", f"CUFLASH_{traits.bias.upper()}" if traits.bias else 0),
        ("MASK", int(traits.mask)),
        ("ALIBI", int(traits.alibi_slopes)),
        ("SOFTCAP", softcap_degree(traits) if caps_by_polynomial else int(traits.softcap != 0)),
        ("VARLEN", int(traits.is_varlen)),
        ("QUERY_OFFSET", int(traits.query_offset)),
        ("SEQLENS_K", int(traits.seqlens_k)),
        ("PAGED", int(traits.page_table)),
    )


def softcap_degree(traits: Traits) -> int:
    """Degree of the polynomial that caps scores as long as they are small; 0 without softcap, 1 for unusual ones.

    Degree 3 is exact enough for scores up to 5 if softcap is 30, and degree 5 for more. Beside other features there is
    no polynomial, and one build serves every usual softcap.
    """
    if traits.softcap == 0:
        return 0
    if not 1e-15 <= traits.softcap <= 256:
        return 1
    alone = traits.num_arrays == 0 and traits.num_terms == 1
    return 3 if alone and traits.softcap >= 30 else 5
