"""How calls are written: types of arguments and results, and what other libraries call our options.

A result without the lse is a union with `WithoutLse`, which is no more than its name and cannot be unpacked. So
``out, lse = attention(q, k, v)``, where ``return_lse=True`` is forgotten, is an error for a type checker. NumPy's own
type would pass, as arrays can be iterated, and so would the call itself if the first axis had two entries. Who wants to
iterate over a result writes ``np.asarray(out)``. `WithoutState` is the same for `output_final_state`.

The other names are those of PyTorch, FlashAttention, xFormers, JAX, FlashInfer and Transformers, as hints for a call
that is carried over from one of them. None is accepted: many mean something slightly else, and a wrong result is worse
than an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sized
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypedDict, TypeVar

import numpy as np

Causal = bool | np.bool_ | Literal["bottom_right", "top_left"]
Window = tuple[SupportsIndex | None, SupportsIndex | None] | list[int] | list[int | None]
Real = float | np.floating[Any] | np.integer[Any]
Precision = Literal["ieee", "tf32"]
FloatDtype = Literal["float16", "bfloat16", "float32", "float64"] | np.dtype[Any] | type[np.generic] | type[float]

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack as Unpack

    NumpyArray = TypeVar("NumpyArray", bound=NDArray[Any])

    class _Alone(np.ndarray[Any, np.dtype[Any]]):
        """Like an array of whatever library.

        Operators are named because those of NumPy say that the result is NumPy's.
        """

        def __getattr__(self, name: str) -> Any: ...

        def __add__(self, other: Any, /) -> Any: ...
        def __radd__(self, other: Any, /) -> Any: ...
        def __sub__(self, other: Any, /) -> Any: ...
        def __rsub__(self, other: Any, /) -> Any: ...
        def __mul__(self, other: Any, /) -> Any: ...
        def __rmul__(self, other: Any, /) -> Any: ...
        def __truediv__(self, other: Any, /) -> Any: ...
        def __rtruediv__(self, other: Any, /) -> Any: ...
        def __floordiv__(self, other: Any, /) -> Any: ...
        def __rfloordiv__(self, other: Any, /) -> Any: ...
        def __mod__(self, other: Any, /) -> Any: ...
        def __rmod__(self, other: Any, /) -> Any: ...
        def __pow__(self, other: Any, mod: None = None, /) -> Any: ...
        def __rpow__(self, other: Any, mod: None = None, /) -> Any: ...
        def __matmul__(self, other: Any, /) -> Any: ...
        def __rmatmul__(self, other: Any, /) -> Any: ...
        def __eq__(self, other: Any, /) -> Any: ...
        def __ne__(self, other: Any, /) -> Any: ...
        def __lt__(self, other: Any, /) -> Any: ...
        def __le__(self, other: Any, /) -> Any: ...
        def __gt__(self, other: Any, /) -> Any: ...
        def __ge__(self, other: Any, /) -> Any: ...
        def __getitem__(self, other: Any, /) -> Any: ...

    class PassReturnLse:
        """Named by what type checkers say."""

    class WithoutLse(_Alone):
        """Not a pair."""

        __iter__: PassReturnLse  # type: ignore[assignment]

    class PassOutputFinalState:
        """Likewise."""

    class WithoutState(_Alone):
        """Likewise."""

        __iter__: PassOutputFinalState  # type: ignore[assignment]

    class SupportsDlpack(Protocol):
        """An array of any library that exchanges arrays by DLPack."""

        def __dlpack_device__(self) -> Any: ...

    class SupportsCudaArray(Protocol):
        """An array on a GPU of any library that has the CUDA array interface."""

        @property
        def __cuda_array_interface__(self) -> Any: ...

    AnyArray = SupportsDlpack | SupportsCudaArray
    Pair = tuple[Any, Any]

    class Options(TypedDict, total=False):
        """What both functions take; results are then arrays like the queries."""

        causal: Causal
        window: Window | None
        scale: Real | None
        softcap: Real | None
        alibi_slopes: AnyArray | None
        sinks: AnyArray | None
        precision: Precision | None

    class DenseOptions(Options, total=False):
        """What `attention` takes beside."""

        query_offset: SupportsIndex | AnyArray | None
        bias: AnyArray | None
        mask: AnyArray | None
        workspace: AnyArray | None

    class VarlenOptions(Options, total=False):
        """What `attention_varlen` takes beside."""

        max_seqlen_q: SupportsIndex | None
        max_seqlen_k: SupportsIndex | None

    class SlotOptions(Options, total=False):
        """What `KVCache.attention` takes beside."""

        num_splits: SupportsIndex | None
        split_size: SupportsIndex | None
        bias: AnyArray | None
        mask: AnyArray | None
        workspace: AnyArray | None

    class CacheOptions(SlotOptions, total=False):
        """What `attention_with_kv_cache` takes beside."""

        k_new: AnyArray | None
        v_new: AnyArray | None
        page_table: AnyArray | None

    class DenseResults(DenseOptions, total=False):
        """With a choice of results, whose type is left open."""

        out: AnyArray | None
        out_dtype: FloatDtype | None

    class VarlenResults(VarlenOptions, total=False):
        """Likewise."""

        out: AnyArray | None
        out_dtype: FloatDtype | None

    class SlotResults(SlotOptions, total=False):
        """Likewise."""

        out: AnyArray | None
        out_dtype: FloatDtype | None

    class CacheResults(CacheOptions, total=False):
        """Likewise."""

        out: AnyArray | None
        out_dtype: FloatDtype | None

    class GatedOptions(TypedDict, total=False):
        """What `chunk_gated_delta_rule` takes, but for the choice of results."""

        scale: Real | None
        initial_state: AnyArray | None
        cu_seqlens: AnyArray | None
        chunk_size: SupportsIndex
        out: AnyArray | None


Function = TypeVar("Function", bound=Callable[..., Any])

_CAUSAL = "causal (True lets the last query see the last key; 'top_left' lines up the first ones, as PyTorch does)"
_LENGTHS = "cu_seqlens_q and cu_seqlens_k, which attention_varlen takes"
_MASK = "mask (bool, True = attend), or bias if it is added to the scores"
_PADDING = "mask (bool, True = attend, shape (B, 1, 1, Nk))"
_CACHED = f"{_PADDING}; attention_with_kv_cache takes seqlens_k"
_WINDOW = "window=(left, right), in which None leaves a side open, not -1"
_OUR_NAMES = {
    "alibi": "alibi_slopes",
    "attention_mask": _MASK,
    "attn_bias": "bias, or causal, window or mask for what only hides",
    "attn_mask": _MASK,
    "block_mask": _MASK,
    "block_table": "page_table, which attention_with_kv_cache takes",
    "cache_seqlens": _CACHED,
    "causal_mask": _CAUSAL,
    "cu_seqlens": _LENGTHS,
    "cu_seqlens_kv": _LENGTHS,
    "custom_mask": "mask (bool, True = attend)",
    "dtype": "out_dtype",
    "is_causal": _CAUSAL,
    "key": "k",
    "key_padding_mask": f"{_PADDING}: ~key_padding_mask[:, None, None, :] if True is padding",
    "key_value_seq_lengths": _CACHED,
    "learnable_sink": "sinks",
    "local_window_size": "window=(left, right), query_offset=0; an int w is (w, w)",
    "logit_cap": "softcap",
    "logits_soft_cap": "softcap",
    "need_weights": "return_lse: weights are not stored, and exp(logit - lse) brings them back",
    "query": "q",
    "query_seq_lengths": "mask (bool, True = attend, shape (B, 1, Nq, 1))",
    "return_attn_probs": "return_lse",
    "return_residual": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "segment_ids": _LENGTHS,
    "seqused_k": _CACHED,
    "sink": "sinks",
    "sliding_window": "window=(sliding_window - 1, 0)",
    "sm_scale": "scale",
    "soft_cap": "softcap",
    "softmax_lse": "lse",
    "softmax_scale": "scale",
    "value": "v",
    "window_left": _WINDOW,
    "window_size": _WINDOW,
}
_OUR_NAMES_BESIDE = {
    "seqlens_k": {
        "block_table": "page_table",
        "block_tables": "page_table",
        "cache_batch_idx": "page_table, with a page for each batch of the cache",
        "cache_lens": "seqlens_k",
        "cache_seqlens": "seqlens_k",
        "context_lens": "seqlens_k",
        "k": "k_new, which is appended to k_cache",
        "key_value_seq_lengths": "seqlens_k",
        "kv_lens": "seqlens_k",
        "local_window_size": "window=(left, right); an int w is (w, w)",
        "page_indices": "page_table",
        "seq_lens": "seqlens_k",
        "seqused_k": "seqlens_k",
        "slot_mapping": "seqlens_k and page_table, which say where k_new and v_new are appended",
        "v": "v_new, which is appended to v_cache",
    },
    "log_g": {"g": "log_g, the natural logarithm of each token's gate"},
    "log_g_cumsum": {"g": "log_g_cumsum, the natural logarithm of the gates, cumulated inside each chunk"},
    "page_size": {
        "block_size": "page_size",
        "max_batch_size": "num_slots",
        "max_cache_len": "capacity",
        "max_seq_len": "capacity",
        "num_blocks": "num_pages",
        "num_key_value_heads": "num_heads_kv",
    },
    "state": {"initial_state": "state, which is updated in place"},
}
"""The same for functions that have a certain parameter, where a name means another thing elsewhere."""
_ROTATED = "cuflash rotates nothing: rotate q and k before the call"
_PAGES = "a page has as many keys as axis -2 of k_cache, (pages, heads, page_size, feature)"
_HEADS_FIRST = "axes are (..., heads, sequence, feature); x.swapaxes(-3, -2) makes them so without a copy"
_NO_DROPOUT = "cuflash has no dropout, leave it out"
_NOT_NEEDED = {
    "block_size": _PAGES,
    "cache_leftpad": "cuflash counts keys from the first row of a cache; mask hides those in front",
    "deterministic": "results are always repeatable to the bit, leave it out",
    "dropout": _NO_DROPOUT,
    "dropout_p": _NO_DROPOUT,
    "dropout_rate": _NO_DROPOUT,
    "enable_gqa": "k and v may always have fewer heads than q, leave it out",
    "head_first": "axes are (batch, tokens, heads, feature); x.swapaxes(1, 2) makes them so without a copy",
    "implementation": "cuflash chooses a kernel itself; cuflash.options(kernel=...) insists on one",
    "kv_layout": _HEADS_FIRST,
    "layout": _HEADS_FIRST,
    "num_splits": "cuflash splits the keys where that helps, leave it out",
    "op": "cuflash chooses a kernel itself; cuflash.options(kernel=...) insists on one",
    "p": _NO_DROPOUT,
    "page_size": _PAGES,
    "rotary_cos": _ROTATED,
    "rotary_interleaved": _ROTATED,
    "rotary_sin": _ROTATED,
    "score_mod": "cuflash has no functions of scores; softcap, bias, alibi_slopes, causal, window and mask are options",
    "tensor_layout": _HEADS_FIRST,
    "use_qk_l2norm_in_kernel": "cuflash normalises nothing: divide q and k by their norms before the call",
}
_parameters: dict[str, frozenset[str]] = {}
"""Names of the parameters of each public function that explains unknown ones."""
positional: dict[str, list[str]] = {}
"""Those of them that need not be named."""


def explains_unknown_options(function: Function) -> Function:
    """Leave `*more` and `**unknown` out of the signature that `help` and `inspect.signature` show."""
    signature = inspect.signature(function)
    shown = _without_unknown(signature)
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    _parameters[function.__name__] = frozenset(x.name for x in shown)
    positional[function.__name__] = [x.name for x in shown if x.kind is not inspect.Parameter.KEYWORD_ONLY]
    return function


def explains_unknown_names(function: Function) -> Function:
    """Refuse named arguments that a function does not have with the same hints; a class by its `__init__`.

    A call more, for what is not called by the thousand: such functions have no defaults for what a call must have.
    """
    name = function.__qualname__.removesuffix(".__init__")
    known = _parameters[name] = frozenset(inspect.signature(function).parameters) - {"self"}

    @wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        if not known.issuperset(given):
            check_options(name, given)
        return function(*args, **given)

    return checked  # type: ignore[return-value]


def _without_unknown(signature: inspect.Signature) -> list[inspect.Parameter]:
    hidden = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [x for x in signature.parameters.values() if x.kind not in hidden]


def check_options(
    function: str, given: Iterable[str], more: Sized = (), namesake: Callable[..., Any] | None = None
) -> None:
    """Raise a TypeError that helps with what a public function does not have: positional arguments, or an option.

    Only of those that explain unknown ones; Python itself refuses them for others. `namesake`: the function that was
    called, if it is another one of that name, with options of its own.
    """
    if more:
        names = positional[function]
        others = ", ".join(sorted(_parameters[function].difference(names)))
        raise TypeError(
            f"{function}() takes {len(names)} positional arguments ({', '.join(names)}) but {len(names) + len(more)} "
            f"were given; name the others, of {others}"
        )
    known = _parameters.get(function)
    for name in given:
        if known is not None and name not in known:
            if namesake is not None:
                known = frozenset(x.name for x in _without_unknown(inspect.signature(namesake)))
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {_hint(name, known)}")


def _hint(name: str, known: frozenset[str]) -> str:
    for parameter, names in _OUR_NAMES_BESIDE.items():
        if parameter in known and name in names:
            return f"cuflash calls it {names[name]}"
    kind = _kind(known)
    if kind["q"] and name in _NOT_NEEDED:
        return _NOT_NEEDED[name]
    if kind["causal"] and name in _OUR_NAMES:
        return f"cuflash calls it {_OUR_NAMES[name]}"
    alike = {function: x for function, x in _parameters.items() if name in x and _kind(x) == kind}
    if alike:
        return f"{max(alike, key=lambda function: len(alike[function] & known))} takes it"
    from difflib import get_close_matches

    elsewhere = {*(_OUR_NAMES if kind["causal"] else ()), *(_NOT_NEEDED if kind["q"] else ())}
    for close in get_close_matches(name.lower(), sorted(known | elsewhere), n=1):
        return f"did you mean {close}?" if close in known else f"did you mean {close}? {_hint(close, known)}"
    return f"expected one of {', '.join(sorted(known - {'q', 'k', 'v'}))}"


def _kind(parameters: frozenset[str]) -> dict[str, bool]:
    """What functions have in common whose options are mixed up: attention, the delta rule, what computes neither."""
    return {name: name in parameters for name in ("q", "causal")}
