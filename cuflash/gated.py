"""The gated delta rule: three public functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from .cpu.gated import execute_gated_on_host
from .problem.arrays import HOST, MISSING, ArrayInfo
from .problem.describe_gated import (
    describe_chunk_gated_delta_rule,
    describe_chunk_gated_output,
    describe_recurrent_gated_delta_rule,
)
from .problem.gated import GatedProblem
from .problem.hints import check_options, explains_unknown_options
from .problem.signatures import Real

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .problem.signatures import AnyArray, GatedOptions, NumpyArray, Pair, Unpack, WithoutState


# fmt: off
@overload
def chunk_gated_output(
    q: NumpyArray, k: AnyArray, v_new: AnyArray, h: AnyArray, log_g_cumsum: AnyArray, cu_seqlens: AnyArray,
    *, scale: Real | None = None, chunk_size: SupportsIndex = 64, out: AnyArray | None = None,
) -> NumpyArray: ...
@overload
def chunk_gated_output(
    q: AnyArray, k: AnyArray, v_new: AnyArray, h: AnyArray, log_g_cumsum: AnyArray, cu_seqlens: AnyArray,
    *, scale: Real | None = None, chunk_size: SupportsIndex = 64, out: AnyArray | None = None,
) -> Any: ...
# fmt: on
@explains_unknown_options
def chunk_gated_output(
    q: Any = MISSING,
    k: Any = MISSING,
    v_new: Any = MISSING,
    h: Any = MISSING,
    log_g_cumsum: Any = MISSING,
    cu_seqlens: Any = MISSING,
    *more: Any,
    scale: Real | None = None,
    chunk_size: SupportsIndex = 64,
    out: Any = None,
    **unknown: Any,
) -> Any:
    r"""Output of gated linear attention in chunks, from the state before each of them.

    This is the last step of a chunked linear recurrence such as the gated delta rule [1]_ [2]_: for token :math:`i` of
    a chunk that begins with the state :math:`H`, with gates :math:`c` cumulated inside the chunk,

    .. math:: o_i = \mathrm{scale} \Bigl( e^{c_i} H^T q_i + \sum_{j \le i} e^{c_i - c_j} (q_i \cdot k_j) \, v_j \Bigr).

    No token sees another chunk but through :math:`H`, and no chunk reaches into the next sequence.

    Parameters
    ----------
    q, k : array, shape (total, H, K)
        Queries and keys of all sequences, one sequence behind the other: float16, bfloat16 (``ml_dtypes.bfloat16``),
        float32 or float64. Any strides. ``K`` is 1 to 256.
    v_new : array, shape (total, Hv, V)
        Values, of the same dtype; for the delta rule what each token adds to the state. ``Hv`` must be a multiple of
        ``H``: head ``h`` of the values belongs to head ``h // (Hv // H)`` of `q` and `k`. ``V`` is 1 to 256.
    h : array, shape (num_chunks, Hv, K, V)
        State before each chunk, of the first sequence's chunks, then of the second's, and so on; any float dtype, any
        strides. One whose last axes are ``(V, K)`` goes in as ``h.swapaxes(-1, -2)``, which copies nothing. Surplus
        rows are ignored.
    log_g_cumsum : array, shape (total, Hv)
        Natural logarithm of the decay, cumulated from the first token of its chunk, that token's own gate included; any
        float dtype, at most 0, not rising inside a chunk. Base 2 is multiplied by ``log(2)``.
    cu_seqlens : integer array, shape (N + 1,)
        Sequence ``n`` has the tokens ``cu_seqlens[n]`` up to ``cu_seqlens[n + 1]``; begins with 0, never falls.
    scale : float, optional
        Factor of the output, by default ``K ** -0.5``; up to 1e30 in magnitude, 1e300 for float64.
    chunk_size : {16, 32, 64, 128}
        Tokens of a chunk; the last one of a sequence may have fewer.
    out : array, shape (total, Hv, V), optional
        Written in place, any strides, and returned; of the dtype of `q`. Must not overlap an input.

    Returns
    -------
    o : array, shape (total, Hv, V)
        Of the dtype of `q`; 0 in rows behind ``cu_seqlens[-1]``, whatever the inputs hold there. NumPy for NumPy, else
        CuPy; a new array lies in memory in the axis order of `q`.

    Raises
    ------
    TypeError
        Not arrays, wrong or mixed dtypes, NumPy mixed with GPU arrays.
    ValueError
        Shapes, devices or options that do not fit; `out` that is read-only or overlaps. For NumPy arrays too few rows
        of `h`, malformed `cu_seqlens`, a gate above 0 or NaN. All errors name argument, got and expected, and are
        raised before anything is launched or written.

    See Also
    --------
    chunk_gated_delta_rule : The whole operation, from gates that are not cumulated.

    Notes
    -----
    Computed in float32 (float64 for float64). Of GPU arrays no value is looked at before the launch: with too few rows
    of `h`, malformed `cu_seqlens`, or gates above 0 or NaN the result is undefined, but nothing outside of the arrays
    is read or written.

    A cumulated gate of ``-inf`` cuts off what was before. Where two are ``-inf``, their difference is taken as 0: of
    decays behind such a reset, up to the end of its chunk, the sum has lost all trace. `chunk_gated_delta_rule`, which
    takes gates one by one, loses nothing.

    References
    ----------
    .. [1] S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
       arXiv:2412.06464.
    .. [2] S. Yang, B. Wang, Y. Zhang, Y. Shen, Y. Kim, "Parallelizing Linear Transformers with the Delta Rule over
       Sequence Length", 2024, arXiv:2406.06484.

    Examples
    --------
    Two sequences of 70 and 30 tokens, which are three chunks:

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v_new = rng.standard_normal((3, 100, 4, 32), dtype=np.float32)
    >>> h = rng.standard_normal((3, 4, 32, 32), dtype=np.float32)
    >>> log_g_cumsum = np.zeros((100, 4), np.float32)  # no decay
    >>> o = cuflash.chunk_gated_output(q, k, v_new, h, log_g_cumsum, np.array([0, 70, 100]))
    >>> state = h[2] + k[70, :, :, None] * v_new[70, :, None]  # behind the first token of the second sequence
    >>> np.allclose(o[70], (q[70, :, None] @ state)[:, 0] / 32**0.5, atol=1e-5)
    True
    """
    if unknown or more:
        check_options("chunk_gated_output", unknown, more)
    problem, infos = describe_chunk_gated_output(
        q, k, v_new, h, log_g_cumsum, cu_seqlens, scale=scale, chunk_size=chunk_size, out=out
    )
    return _execute(problem, infos, out, final=False)


# fmt: off
@overload
def chunk_gated_delta_rule(
    q: NumpyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray,
    *, output_final_state: Literal[False] = False, **options: Unpack[GatedOptions],
) -> NumpyArray | WithoutState: ...
@overload
def chunk_gated_delta_rule(
    q: NumpyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray,
    *, output_final_state: Literal[True], **options: Unpack[GatedOptions],
) -> tuple[NumpyArray, NDArray[Any]]: ...
@overload
def chunk_gated_delta_rule(
    q: NumpyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray,
    *, output_final_state: bool, **options: Unpack[GatedOptions],
) -> NumpyArray | WithoutState | tuple[NumpyArray, NDArray[Any]]: ...
@overload
def chunk_gated_delta_rule(
    q: AnyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray,
    *, output_final_state: Literal[False] = False, **options: Unpack[GatedOptions],
) -> Any | WithoutState: ...
@overload
def chunk_gated_delta_rule(
    q: AnyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray,
    *, output_final_state: Literal[True], **options: Unpack[GatedOptions],
) -> Pair: ...
@overload
def chunk_gated_delta_rule(
    q: AnyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray,
    *, output_final_state: bool, **options: Unpack[GatedOptions],
) -> Any | WithoutState | Pair: ...
# fmt: on
@explains_unknown_options
def chunk_gated_delta_rule(
    q: Any = MISSING,
    k: Any = MISSING,
    v: Any = MISSING,
    log_g: Any = MISSING,
    beta: Any = MISSING,
    *more: Any,
    scale: Real | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    chunk_size: SupportsIndex = 64,
    out: Any = None,
    **unknown: Any,
) -> Any:
    r"""Gated delta rule, a chunk of tokens at a time: for training lengths and prompts.

    Each head of the values has a state :math:`S`, a matrix that holds values by their keys. Token by token [1]_

    .. math:: S \leftarrow e^{g} S, \qquad u = \beta \, (v - S^T k), \qquad S \leftarrow S + k u^T, \qquad
              o = \mathrm{scale} \; S^T q :

    it decays, what it holds for the key moves towards the value by the part :math:`\beta`, and the query reads it. The
    work is linear in the number of tokens. Inside a chunk the updates :math:`u` are found at once, by a triangular
    system [2]_; the result is that of the recurrence, beyond rounding. Infinities and NaN of k, v or beta, and products
    of keys that overflow, reach earlier tokens of their chunk, too.

    Parameters
    ----------
    q, k : array, shape (B, T, H, K)
        Queries and keys: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. Any strides. ``K`` is 1 to
        256. Keys are taken as they are: with ``beta * (k @ k)`` above 2 states grow from token to token, so give them
        norm 1 (queries usually have it, too).
    v : array, shape (B, T, Hv, V)
        Values, of the same dtype. ``Hv`` must be a multiple of ``H``: head ``h`` of the values belongs to head
        ``h // (Hv // H)`` of `q` and `k`. ``V`` is 1 to 256.
    log_g : array, shape (B, T, Hv)
        Natural logarithm of each token's decay, any float dtype, at most 0; ``-inf`` forgets all that was before. A
        decay ``alpha`` in (0, 1] goes in as ``np.log(alpha)``, base 2 is multiplied by ``log(2)``.
    beta : array, shape (B, T, Hv)
        Any float dtype, usually in [0, 1] or [0, 2].
    scale : float, optional
        Factor of the output, by default ``K ** -0.5``; up to 1e30 in magnitude, 1e300 for float64.
    initial_state : array, shape (N, Hv, K, V), optional
        States before the first token, float32 (float64 for float64), any strides, by default 0. ``N`` is ``B``, or the
        number of packed sequences. One whose last axes are ``(V, K)`` goes in as ``initial_state.swapaxes(-1, -2)``.
        Not modified.
    output_final_state : bool
        Return the states behind the last token, too.
    cu_seqlens : integer array, shape (N + 1,), optional
        Packed sequences, with ``B`` = 1: sequence ``n`` has the tokens ``cu_seqlens[n]`` up to ``cu_seqlens[n + 1]``;
        begins with 0, never falls. An empty sequence leaves its state as it is.
    chunk_size : {16, 32, 64, 128}
        Tokens that NumPy computes at once; it decides speed and rounding. Kernels on a GPU have chunks of their own.
    out : array, shape (B, T, Hv, V), optional
        Written in place, any strides, and returned; of the dtype of `q`. Must not overlap an input.

    Returns
    -------
    o : array, shape (B, T, Hv, V)
        Of the dtype of `q`; 0 in rows behind ``cu_seqlens[-1]``, whatever the inputs hold there. NumPy for NumPy, else
        CuPy; a new array lies in memory in the axis order of `q`.
    final_state : array, shape (N, Hv, K, V)
        Only with `output_final_state`: float32 (float64 for float64), in memory in the axis order of `initial_state`.

    Raises
    ------
    TypeError
        Not arrays, wrong or mixed dtypes, NumPy mixed with GPU arrays.
    ValueError
        Shapes, devices or options that do not fit; `out` that is read-only or overlaps. For NumPy arrays malformed
        `cu_seqlens`, a gate above 0 or NaN. All errors name argument, got and expected, and are raised before anything
        is launched or written.

    See Also
    --------
    recurrent_gated_delta_rule : Token by token, with states that are updated in place: for generation.
    chunk_gated_output : Its last step alone.

    Notes
    -----
    Computed in float32 (float64 for float64). Of GPU arrays no value is looked at before the launch: with malformed
    `cu_seqlens`, or gates above 0 or NaN, the result is undefined, but nothing outside of the arrays is read or
    written.

    References
    ----------
    .. [1] S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
       arXiv:2412.06464.
    .. [2] S. Yang, B. Wang, Y. Zhang, Y. Shen, Y. Kim, "Parallelizing Linear Transformers with the Delta Rule over
       Sequence Length", 2024, arXiv:2406.06484.

    Examples
    --------
    A sequence in two parts, the second one from the state that the first one leaves:

    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 100, 2, 32), dtype=np.float32)
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> log_g, beta = -rng.random((2, 1, 100, 2), dtype=np.float32) * [[[[0.1]]], [[[-1]]]]
    >>> tokens = q, k, v, log_g, beta
    >>> whole = cuflash.chunk_gated_delta_rule(*tokens)
    >>> first, state = cuflash.chunk_gated_delta_rule(*(x[:, :30] for x in tokens), output_final_state=True)
    >>> second = cuflash.chunk_gated_delta_rule(*(x[:, 30:] for x in tokens), initial_state=state)
    >>> np.allclose(whole, np.concatenate([first, second], axis=1), atol=1e-5)
    True
    """
    if unknown or more:
        check_options("chunk_gated_delta_rule", unknown, more)
    problem, infos = describe_chunk_gated_delta_rule(
        q, k, v, log_g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, chunk_size=chunk_size, out=out,
    )  # fmt: skip
    return _execute(problem, infos, out, final=bool(output_final_state))


# fmt: off
@overload
def recurrent_gated_delta_rule(
    q: NumpyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray, state: AnyArray,
    *, scale: Real | None = None, out: AnyArray | None = None,
) -> NumpyArray: ...
@overload
def recurrent_gated_delta_rule(
    q: AnyArray, k: AnyArray, v: AnyArray, log_g: AnyArray, beta: AnyArray, state: AnyArray,
    *, scale: Real | None = None, out: AnyArray | None = None,
) -> Any: ...
# fmt: on
@explains_unknown_options
def recurrent_gated_delta_rule(
    q: Any = MISSING,
    k: Any = MISSING,
    v: Any = MISSING,
    log_g: Any = MISSING,
    beta: Any = MISSING,
    state: Any = MISSING,
    *more: Any,
    scale: Real | None = None,
    out: Any = None,
    **unknown: Any,
) -> Any:
    r"""Gated delta rule, token by token, with states that are updated in place: for generation.

    The operation is that of `chunk_gated_delta_rule` [1]_: each state :math:`S` becomes :math:`e^{g} S`, then
    :math:`S + k u^T` with :math:`u = \beta \, (v - S^T k)`, and :math:`o = \mathrm{scale} \; S^T q`. With few tokens a
    call takes the time of reading and writing the states.

    Parameters
    ----------
    q, k : array, shape (B, T, H, K)
        Queries and keys: float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64. Any strides. ``K`` is 1 to
        256.
    v : array, shape (B, T, Hv, V)
        Values, of the same dtype. ``Hv`` must be a multiple of ``H``: head ``h`` of the values belongs to head
        ``h // (Hv // H)`` of `q` and `k`. ``V`` is 1 to 256.
    log_g : array, shape (B, T, Hv)
        Natural logarithm of each token's decay, any float dtype, at most 0; ``-inf`` forgets all that was before. A
        decay ``alpha`` in (0, 1] goes in as ``np.log(alpha)``, base 2 is multiplied by ``log(2)``.
    beta : array, shape (B, T, Hv)
        Any float dtype, usually in [0, 1] or [0, 2].
    state : array, shape (B, Hv, K, V)
        States, float32 (float64 for float64), any strides, **updated in place**. Those whose last axes are ``(V, K)``
        go in as ``state.swapaxes(-1, -2)``. Must not overlap another array.
    scale : float, optional
        Factor of the output, by default ``K ** -0.5``; up to 1e30 in magnitude, 1e300 for float64.
    out : array, shape (B, T, Hv, V), optional
        Written in place, any strides, and returned; of the dtype of `q`. Must not overlap another array.

    Returns
    -------
    o : array, shape (B, T, Hv, V)
        Of the dtype of `q`. NumPy for NumPy, else CuPy; a new array lies in memory in the axis order of `q`.

    Raises
    ------
    TypeError
        Not arrays, wrong or mixed dtypes, NumPy mixed with GPU arrays.
    ValueError
        Shapes or devices that do not fit; `state` or `out` that is read-only or overlaps. For NumPy arrays a gate above
        0 or NaN. All errors name argument, got and expected, and are raised before anything is launched or written.

    See Also
    --------
    chunk_gated_delta_rule : Faster for many tokens.

    Notes
    -----
    Computed in float32 (float64 for float64). Of GPU arrays no value is looked at before the launch: with gates above 0
    or NaN the result is undefined.

    References
    ----------
    .. [1] S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
       arXiv:2412.06464.

    Examples
    --------
    What is stored under a key is read back, and replaced:

    >>> import numpy as np, cuflash
    >>> state = np.zeros((1, 1, 4, 2), np.float32)
    >>> key, gate, beta = np.eye(4, dtype=np.float32)[:1, None, None], np.zeros((1, 1, 1)), np.ones((1, 1, 1))
    >>> for value in ([3.0, 4.0], [5.0, 6.0]):
    ...     v = np.float32(value).reshape(1, 1, 1, 2)
    ...     print(cuflash.recurrent_gated_delta_rule(key, key, v, gate, beta, state, scale=1)[0, 0, 0])
    [3. 4.]
    [5. 6.]
    """
    if unknown or more:
        check_options("recurrent_gated_delta_rule", unknown, more)
    problem, infos = describe_recurrent_gated_delta_rule(q, k, v, log_g, beta, state, scale=scale, out=out)
    return _execute(problem, infos, out, final=False)


def _execute(problem: GatedProblem, infos: dict[str, ArrayInfo], out: Any, final: bool) -> Any:
    """Compute a checked problem where its arrays are."""
    if infos["q"].device == HOST:
        return execute_gated_on_host(problem, infos, out, final)
    from .gpu.gated import execute_gated_on_gpu

    return execute_gated_on_gpu(problem, infos, out, final)
