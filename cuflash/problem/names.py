"""What other libraries call the options of `attention`: hints for a call that is carried over from one of them.

The names are those of PyTorch, FlashAttention, xFormers, JAX, FlashInfer and Transformers. None is accepted: many mean
something slightly else, and a wrong result is worse than an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_CAUSAL = "causal (True lets the last query see the last key; 'top_left' lines up the first ones, as PyTorch does)"
_LENGTHS = "cu_seqlens_q and cu_seqlens_k, which attention_varlen takes"
_MASK = "mask (bool, True = attend), or bias if it is added to the scores"
_PADDING = "mask (bool, True = attend, shape (B, 1, 1, Nk))"
_WINDOW = "window=(left, right), in which None leaves a side open, not -1"
_OUR_NAMES = {
    "alibi": "alibi_slopes",
    "attention_mask": _MASK,
    "attn_bias": "bias, or causal, window or mask for what only hides",
    "attn_mask": _MASK,
    "block_mask": _MASK,
    "cache_seqlens": _PADDING,
    "causal_mask": _CAUSAL,
    "cu_seqlens": _LENGTHS,
    "cu_seqlens_kv": _LENGTHS,
    "custom_mask": "mask (bool, True = attend)",
    "dtype": "out_dtype",
    "is_causal": _CAUSAL,
    "key_padding_mask": f"{_PADDING}: ~key_padding_mask[:, None, None, :] if True is padding",
    "key_value_seq_lengths": _PADDING,
    "learnable_sink": "sinks",
    "local_window_size": _WINDOW,
    "logit_cap": "softcap",
    "logits_soft_cap": "softcap",
    "need_weights": "return_lse: weights are not stored, and exp(logit - lse) brings them back",
    "query_seq_lengths": "mask (bool, True = attend, shape (B, 1, Nq, 1))",
    "return_attn_probs": "return_lse",
    "return_residual": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "segment_ids": _LENGTHS,
    "seqused_k": _PADDING,
    "sink": "sinks",
    "sliding_window": "window=(sliding_window - 1, 0)",
    "sm_scale": "scale",
    "soft_cap": "softcap",
    "softmax_lse": "lse",
    "softmax_scale": "scale",
    "window_left": _WINDOW,
    "window_size": _WINDOW,
}
_HEADS_FIRST = "axes are (..., heads, sequence, feature); x.swapaxes(-3, -2) makes them so without a copy"
_NO_DROPOUT = "cuflash has no dropout, leave it out"
_NOT_NEEDED = {
    "deterministic": "results are always repeatable to the bit, leave it out",
    "dropout": _NO_DROPOUT,
    "dropout_p": _NO_DROPOUT,
    "dropout_rate": _NO_DROPOUT,
    "enable_gqa": "k and v may always have fewer heads than q, leave it out",
    "implementation": "cuflash chooses a kernel itself; cuflash.options(kernel=...) insists on one",
    "kv_layout": _HEADS_FIRST,
    "layout": _HEADS_FIRST,
    "num_splits": "cuflash splits the keys where that helps, leave it out",
    "p": _NO_DROPOUT,
    "score_mod": "cuflash has no functions of scores; softcap, bias, alibi_slopes, causal, window and mask are options",
    "tensor_layout": _HEADS_FIRST,
}
_parameters: dict[str, frozenset[str]] = {}
"""Names of the parameters of each public function that explains unknown ones."""


def explains_unknown_options(function: Function) -> Function:
    """Leave the last parameter, `**unknown`, out of the signature that `help` and `inspect.signature` show."""
    signature = inspect.signature(function)
    shown = [x for x in signature.parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    _parameters[function.__name__] = frozenset(x.name for x in shown)
    return function


def check_options(function: str, given: Iterable[str]) -> None:
    """Raise a TypeError that helps with the first of the options that a public function does not have."""
    known = _parameters[function]
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {_hint(name, known)}")


def _hint(name: str, known: frozenset[str]) -> str:
    for function, parameters in _parameters.items():
        if name in parameters:
            return f"{function} takes it"
    if name in _OUR_NAMES:
        return f"cuflash calls it {_OUR_NAMES[name]}"
    if name in _NOT_NEEDED:
        return _NOT_NEEDED[name]
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else f"expected one of {', '.join(sorted(known - {'q', 'k', 'v'}))}"
