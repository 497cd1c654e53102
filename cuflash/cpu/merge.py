"""Partial results of NumPy arrays, merged in float64: the error does not grow with the number of parts."""

from __future__ import annotations

import numpy as np

from ..problem.parts import Parts, result_operands
from .execute import allocate


def merge_parts_on_host(parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Compute `merge_attention_states` of checked NumPy arrays."""
    out_result, lse_result = result_operands(parts)
    out = allocate(parts.outs[0].shape, out_result.dtype, out_result.strides)
    lse = allocate(parts.lses[0].shape, lse_result.dtype, lse_result.strides)
    lses = [info.array.astype(np.float64, copy=False) for info in parts.lses]
    largest = np.maximum.reduce(lses)

    def relative(part: np.ndarray) -> np.ndarray:
        """exp(part - largest), where infinities that are equal give 1."""
        weight: np.ndarray = np.exp(np.where(part == largest, 0.0, part - largest))
        return weight

    with np.errstate(all="ignore"):  # infinities and NaN are values here
        total = np.zeros(largest.shape)
        for part in lses:
            total += relative(part)
        lse[...] = largest + np.log(total)
        values = out if out.dtype == np.float64 else np.empty_like(out, np.float64)
        values.fill(0)
        for info, part in zip(parts.outs, lses, strict=True):
            weight = relative(part) / total
            array, unseen = info.array.astype(np.float64, copy=False), np.isneginf(part)
            if unseen.any():
                array = np.where(unseen[..., np.newaxis], 0.0, array)
            values += weight[..., np.newaxis] * array
        if values is not out:
            out[...] = values
    return out, lse
