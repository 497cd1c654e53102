"""How calls are written: types of arguments and results, and what other libraries call our options.

A result without the lse is a union with `WithoutLse`, which is no more than its name and cannot be unpacked. So
``out, lse = attention(q, k, v)``, where ``return_lse=True`` is forgotten, is an error for a type checker. NumPy's own
type would pass, as arrays can be iterated, and so would the call itself if the first axis had two entries. Who wants to
iterate over a result writes ``np.asarray(out)``. `WithoutState` is the same for `output_final_state`.

The other names are those of PyTorch, FlashAttention, xFormers, JAX, ONNX, FlashInfer, vLLM, Transformers,
TransformerEngine and flash-linear-attention, for `hints`.
"""

from __future__ import annotations

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


_CAUSAL = "causal (True lets the last query see the last key; 'top_left' lines up the first ones, as PyTorch does)"
_LENGTHS = "cu_seqlens_q and cu_seqlens_k, which attention_varlen takes"
_MASK = "mask (bool, True = attend), or bias if it is added to the scores"
_PADDING = "mask (bool, True = attend, shape (B, 1, 1, Nk))"
_CACHED = f"{_PADDING}; attention_with_kv_cache takes seqlens_k"
_PAGED = "page_table, which attention_with_kv_cache takes: (B, pages of a sequence), with seqlens_k"
_KEPT = "cuflash.KVCache, or k_cache and v_cache, which attention_with_kv_cache takes"
_HALVES = "k_cache and v_cache, its two halves"
_WINDOW = "window=(left, right), in which None leaves a side open, not -1"
OUR_NAMES = {
    "alibi": "alibi_slopes",
    "alibi_bias": "alibi_slopes, a number for each head",
    "attention_mask": _MASK,
    "attn_bias": "bias, or causal, window or mask for what only hides",
    "attn_logit_softcapping": "softcap",
    "attn_mask": _MASK,
    "attn_mask_type": "causal: True for causal_bottom_right, 'top_left' for causal",
    "attn_sink": "sinks",
    "block_mask": _MASK,
    "block_table": "page_table, which attention_with_kv_cache takes",
    "bottom_right_diagonal": _CAUSAL,
    "cache_position": "query_offset, the position of the first query among the keys",
    "cache_seqlens": _CACHED,
    "causal_mask": _CAUSAL,
    "core_attention_bias": "bias",
    "cu_seq_k": _LENGTHS,
    "cu_seq_lens_k": "cu_seqlens_k, which attention_varlen takes",
    "cu_seq_lens_q": "cu_seqlens_q, which attention_varlen takes",
    "cu_seq_q": _LENGTHS,
    "cu_seqlens": _LENGTHS,
    "cu_seqlens_kv": _LENGTHS,
    "custom_mask": "mask (bool, True = attend)",
    "dtype": "out_dtype",
    "head_sink": "sinks",
    "is_causal": _CAUSAL,
    "key": "k",
    "key_padding_mask": f"{_PADDING}: ~key_padding_mask[:, None, None, :] if True is padding",
    "key_value_seq_lengths": _CACHED,
    "kv_cache": f"{_HALVES}, which attention_with_kv_cache takes",
    "kv_indptr": "cu_seqlens_k, which attention_varlen takes",
    "kv_lens": _CACHED,
    "kv_page_indices": _PAGED,
    "kv_page_indptr": _PAGED,
    "learnable_sink": "sinks",
    "local_window_size": "window=(left, right), query_offset=0 (or causal='top_left'); an int w is (w, w)",
    "logit_cap": "softcap",
    "logits_soft_cap": "softcap",
    "max_k": "max_seqlen_k, which attention_varlen takes",
    "max_length_k": "max_seqlen_k, which attention_varlen takes",
    "max_length_q": "max_seqlen_q, which attention_varlen takes",
    "max_q": "max_seqlen_q, which attention_varlen takes",
    "need_weights": "return_lse: weights are not stored, and exp(logit - lse) brings them back",
    "nonpad_kv_seqlen": _CACHED,
    "output_attentions": "return_lse: weights are not stored, and exp(logit - lse) brings them back",
    "paged_kv_cache": f"{_HALVES}, which attention_with_kv_cache takes",
    "paged_kv_indices": _PAGED,
    "paged_kv_indptr": _PAGED,
    "past_key": "k_cache, which attention_with_kv_cache takes, and writes k_new to",
    "past_key_value": _KEPT,
    "past_key_values": _KEPT,
    "past_value": "v_cache, which attention_with_kv_cache takes, and writes v_new to",
    "position_bias": "bias",
    "qo_indptr": "cu_seqlens_q, which attention_varlen takes",
    "query": "q",
    "query_seq_lengths": "mask (bool, True = attend, shape (B, 1, Nq, 1))",
    "return_attn_probs": "return_lse",
    "return_aux": "return_lse",
    "return_residual": "return_lse",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "scaling": "scale",
    "segment_ids": _LENGTHS,
    "seq_lens": _CACHED,
    "seqused_k": _CACHED,
    "seqused_q": "mask (bool, True = attend, shape (B, 1, Nq, 1))",
    "sink": "sinks",
    "sliding_window": "window=(sliding_window - 1, 0)",
    "slopes": "alibi_slopes",
    "sm_scale": "scale",
    "soft_cap": "softcap",
    "softmax_aux": "sinks",
    "softmax_lse": "lse",
    "softmax_offset": "sinks",
    "softmax_scale": "scale",
    "softmax_type": "sinks (zeros for off-by-one)",
    "value": "v",
    "window_left": _WINDOW,
    "window_size": _WINDOW,
}
_BEFORE = "seqlens_k, without what is appended"
_FROM_THE_END = "which counts from where a sequence's last query sees its last key"
_CUMULATED = "cu_seqlens_{}: np.concatenate([[0], np.cumsum({})])"
_LOG_G = "the natural logarithm of each token's gate"
OUR_NAMES_BESIDE = {
    "query_offset": {
        "bottom_right_diagonal": f"{_CAUSAL}, and query_offset=0 for a window from the top left",
    },
    "seqlens_k": {
        "block_table": "page_table",
        "block_tables": "page_table",
        "cache_batch_idx": "page_table, with a page for each batch of the cache",
        "cache_lens": "seqlens_k",
        "cache_position": "seqlens_k, the keys in front of those that are appended: cache_position[0]",
        "cache_seqlens": "seqlens_k",
        "context_lens": "seqlens_k",
        "k": "k_new, which is appended to k_cache",
        "key": "k_new, which is appended to k_cache",
        "key_value_seq_lengths": "seqlens_k",
        "kv_cache": _HALVES,
        "kv_indptr": "page_table, with a row for each sequence, and seqlens_k",
        "kv_lens": _BEFORE,
        "local_window_size": f"window=(left, right), {_FROM_THE_END}",
        "nonpad_kv_seqlen": _BEFORE,
        "page_indices": "page_table",
        "paged_kv_cache": _HALVES,
        "past_key": "k_cache",
        "past_key_value": "k_cache and v_cache",
        "past_key_values": "k_cache and v_cache",
        "past_value": "v_cache",
        "seq_lens": _BEFORE,
        "seqused_k": _BEFORE,
        "slot_mapping": "seqlens_k and page_table, which say where k_new and v_new are appended",
        "v": "v_new, which is appended to v_cache",
        "value": "v_new, which is appended to v_cache",
    },
    "slots": {
        "cache_batch_idx": "slots",
        "key": "k_new",
        "layer_idx": "layer",
        "slot": "slots",
        "slot_mapping": "slots",
        "value": "v_new",
    },
    "cu_seqlens_q": {
        "cu_seq_lens_k": "cu_seqlens_k",
        "cu_seq_lens_q": "cu_seqlens_q",
        "key_value_seq_lengths": _CUMULATED.format("k", "key_value_seq_lengths"),
        "kv_indptr": "cu_seqlens_k",
        "kv_lens": _CUMULATED.format("k", "kv_lens"),
        "local_window_size": f"window=(left, right), {_FROM_THE_END}",
        "max_k": "max_seqlen_k",
        "max_length_k": "max_seqlen_k",
        "max_length_q": "max_seqlen_q",
        "max_q": "max_seqlen_q",
        "qo_indptr": "cu_seqlens_q",
        "query_seq_lengths": _CUMULATED.format("q", "query_seq_lengths"),
        "seq_lens": "cu_seqlens_q and cu_seqlens_k: np.concatenate([[0], np.cumsum(seq_lens)])",
        "seqused_k": "cu_seqlens_k, as sequences lie one behind another without a gap",
        "seqused_q": "cu_seqlens_q, as sequences lie one behind another without a gap",
    },
    "log_g": {"g": f"log_g, {_LOG_G}", "key": "k", "query": "q", "value": "v"},
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
_HEADS_LAST = "axes are (batch, tokens, heads, feature); x.swapaxes(1, 2) makes them so without a copy"
_LAYOUTS = "head_first", "kv_layout", "layout", "qkv_format", "tensor_layout"
_PACKED = "axes are (tokens, heads, feature); x.swapaxes(0, 1) makes them so without a copy"
_CHOSEN = "cuflash chooses a kernel itself; cuflash.options(kernel=...) insists on one"
_NO_DROPOUT = "cuflash has no dropout, leave it out"
_NO_FP8 = "cuflash takes no arrays of 8 bits: multiply by their scales before the call"
_AXIS_OF_HEADS = "heads are an axis of q, k and v: x.reshape(batch, sequence, heads, feature).swapaxes(1, 2)"
_GATE = "cuflash applies no function to gates: log_g = -exp(A_log) * logaddexp(0, g + dt_bias)"
_SIGMOID = "cuflash applies no function to beta: 1 / (1 + exp(-beta)), and twice that with allow_neg_eigval"
_STATE = "states are (..., Hv, K, V): state.swapaxes(-1, -2) makes them so"
_ONE_GATE = "a token has one gate for all features of a head; decays of single features are another operation"
_HELD = "keys, values, lengths and pages are the cache's own; advance and truncate change lengths"
_HELD_NAMES = (
    *("block_table", "block_tables", "cache_lens", "cache_position", "cache_seqlens", "context_lens", "k_cache"),
    *("kv_cache", "kv_indptr", "kv_lens", "page_table", "paged_kv_cache", "past_key_value", "past_key_values"),
    *("seq_lens", "seqlens_k", "seqused_k", "v_cache"),
)
NOT_NEEDED = {
    **dict.fromkeys(("dropout", "dropout_p", "dropout_rate", "p"), _NO_DROPOUT),
    **dict.fromkeys(_LAYOUTS, _HEADS_FIRST),
    **dict.fromkeys(("k_descale", "q_descale", "v_descale"), _NO_FP8),
    **dict.fromkeys(("kv_num_heads", "q_num_heads"), _AXIS_OF_HEADS),
    **dict.fromkeys(("position_ids", "rotary_cos", "rotary_interleaved", "rotary_sin"), _ROTATED),
    **dict.fromkeys(("implementation", "op"), _CHOSEN),
    "attention_chunk": "cuflash has no chunked attention: mask hides keys of other chunks",
    "block_size": _PAGES,
    "cache_leftpad": "cuflash counts keys from the first row of a cache; mask hides those in front",
    "deterministic": "results are always repeatable to the bit, leave it out",
    "enable_gqa": "k and v may always have fewer heads than q, leave it out",
    "head_mask": "cuflash leaves out no heads: multiply the output by it",
    "num_key_value_groups": "heads are counted from the arrays, leave it out",
    "num_splits": "cuflash splits the keys where that helps, leave it out",
    "page_size": _PAGES,
    "qk_matmul_output_mode": "cuflash stores no scores; exp(logit - lse), with return_lse, brings weights back",
    "score_mod": "cuflash has no functions of scores; softcap, bias, alibi_slopes, causal, window and mask are options",
    "softmax_precision": "scores and weights are float32 already, float64 for float64: leave it out",
}
NOT_NEEDED_BESIDE = {
    "query_offset": {"position_ids": f"{_ROTATED}; where queries stand is query_offset"},
    "seqlens_k": {"position_ids": f"{_ROTATED}; the last query stands at the last key, which seqlens_k counts"},
    "cu_seqlens_q": {
        "position_ids": f"{_ROTATED}; where a sequence begins is cu_seqlens_q",
        **dict.fromkeys(_LAYOUTS, _PACKED),
    },
    "log_g_cumsum": {"head_first": _PACKED},
    "slots": {
        "position_ids": f"{_ROTATED}; num_keys counts those in front of it",
        **dict.fromkeys(_HELD_NAMES, _HELD),
    },
    "log_g": {
        "A_log": _GATE,
        "allow_neg_eigval": _SIGMOID,
        "dt_bias": _GATE,
        "gk": _ONE_GATE,
        "gv": _ONE_GATE,
        "head_first": _HEADS_LAST,
        "state_v_first": _STATE,
        "transpose_state_layout": _STATE,
        "use_beta_sigmoid_in_kernel": _SIGMOID,
        "use_gate_in_kernel": _GATE,
        "use_qk_l2norm_in_kernel": (
            "cuflash normalises nothing: divide q and k, in float32, by sqrt((x * x).sum(-1, keepdims=True) + 1e-6)"
        ),
    },
}
TOO_MANY = {"merge_attention_states": "pass [out_a, out_b], [lse_a, lse_b]: the results of all parts, then their lses"}
"""What to pass in place of more positional arguments, where a function takes no others by name."""
