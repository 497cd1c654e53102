"""Blocks of the NumPy back end that see one tile of keys and ask for nothing but a window: no more than the formula.

Most calls are of this kind, and short, so that each call of NumPy counts. Every row sees a key: its largest logit is
finite unless float32 (float64) is too narrow for the logits.
"""

from __future__ import annotations

from math import isfinite, prod

import numpy as np

from .cpu_blocks import Array, Block
from .cpu_scores import MIN_COLUMN, HeadsLast, RowsLast, Scratch, layout_of
from .cpu_tile import FOLDABLE, Arithmetic, hide_edges, load_queries, operand
from .problem import Problem


def is_plain(problem: Problem) -> bool:
    """Whether a problem asks for nothing but a window, in the dtype of the computation."""
    return (
        problem.dtype in ("float32", "float64")
        and problem.out_dtype == problem.dtype
        and problem.lse is problem.sinks is problem.bias is problem.mask is problem.alibi_slopes is None
        and not problem.softcap
        and FOLDABLE[0] <= abs(problem.scale) <= FOLDABLE[1]
    )


def attend_directly(block: Block, arithmetic: Arithmetic, scratch: Scratch) -> Array | None:
    """Compute and store the rows of a block, except for those that float32 was too narrow for.

    Returns
    -------
    ndarray or None
        Which rows (heads, group * rows) these are; None if there are none.
    """
    sequence, dtype = block.sequence, arithmetic.dtype
    source, out = block.of_rows(sequence.q), block.of_rows(sequence.out)
    k = operand(block.of_keys(sequence.k, block.keys), "k", dtype, scratch)
    v = operand(block.of_keys(sequence.v, block.keys), "v", dtype, scratch)
    num_keys, head_dim_v = v.shape[-2:]
    *lead, group, num_rows, head_dim = source.shape
    num_heads, height = prod(lead), group * num_rows
    layout = layout_of(sequence, num_heads, height, num_keys, 1)
    scores = scratch.scores(layout, source.shape[:-1], num_keys, dtype)
    if layout is HeadsLast:
        # There are fewer scores to be scaled than elements of q.
        scores.multiply(operand(source.reshape(*lead, height, head_dim), "q", dtype, scratch), k)
        scores.scale(dtype.type(arithmetic.fold))
    else:
        scores.multiply(load_queries(block, arithmetic, layout is RowsLast and height >= MIN_COLUMN, scratch), k)
    if arithmetic.window_left is not None or arithmetic.window_right is not None:
        hide_edges(scores.logits, block.position, block.keys, arithmetic.window_left, arithmetic.window_right)
    scores.weigh(scores.peak())
    total = scores.sums()
    # Means of values are as finite as these are.
    means = num_keys <= 2 * head_dim_v
    if means:
        scores.divide(total)
    in_place = out.flags.c_contiguous
    shape = (*lead, height, head_dim_v)
    product = out.reshape(shape) if in_place else scratch.take("product", shape, dtype)
    scores.apply(v, product)
    bad = None
    # A largest logit that is infinite makes all weights of its row NaN. The product is the quickest way to see that all
    # is finite, unless some is huge.
    if dtype.itemsize == 4 and not isfinite(np.vdot(checked := total if means else product, checked)):
        finite = np.isfinite(checked)
        bad = ~(finite if means else finite.all(axis=-1).reshape(num_heads, height))
        if not bad.any():
            bad = None
    if not means:
        product /= total.reshape(*shape[:-1], 1)
    if not in_place:
        np.copyto(out, product.reshape(out.shape))
    return bad
