"""What a call of the gated delta rule means, as plain data: a hashable tuple without pointers.

Beside `problem.py`, which holds what a call of attention means. Arrays go by the names of the kernels' argument struct.
"""

from __future__ import annotations

from typing import NamedTuple

from .arrays import computed_dtype


class GatedStrides(NamedTuple):
    """The arrays of a call, each seen with all its axes: bytes from element to element, 0 where an axis is not there.

    Packed sequences, which have no axis of batches, are seen as one batch.
    """

    q: tuple[int, ...]
    """(batch, token, head, feature), like k, v and out."""
    k: tuple[int, ...]
    v: tuple[int, ...]
    """`v_new` of `chunk_gated_output`."""
    log_g: tuple[int, ...]
    """(batch, token, head): `log_g_cumsum` of `chunk_gated_output`."""
    out: tuple[int, ...]
    beta: tuple[int, ...] | None = None
    """(batch, token, head)."""
    states: tuple[int, ...] | None = None
    """`h` of `chunk_gated_output`: (chunk, head, feature of k, feature of v)."""
    initial_state: tuple[int, ...] | None = None
    """(sequence, head, feature of k, feature of v)."""
    final_state: tuple[int, ...] | None = None
    """The same. That of `recurrent_gated_delta_rule` is its initial state, too."""
    cu_seqlens: tuple[int, ...] | None = None


GATED_ARRAYS = GatedStrides._fields
"""Names of a call's arrays."""


class GatedTraits(NamedTuple):
    """All that a build may depend on: no length, no stride, no value."""

    op: str
    """`"chunk_gated_output"`, `"chunk_gated_delta_rule"` or `"recurrent_gated_delta_rule"`."""
    dtype: str
    """Of q, k, v and out."""
    gate_dtype: str
    beta_dtype: str
    """"" where there is none."""
    state_dtype: str
    """Of `states`, or of the initial and final state."""
    head_dim: int
    head_dim_v: int
    chunk_size: int
    """0 where there are no chunks."""
    packed: bool
    """Whether sequences lie one behind the other, as `cu_seqlens` tells."""
    input_alignment: int
    """16 if q, k, v and states can move in 16-byte vectors, 1 if an element of any input lies on no boundary, else the
    size of the smallest element."""
    result_alignment: int
    """The same of what is written."""
    swapped_states: bool = False
    """Whether features of k are neighbours in memory, not those of v; vectors are then of those."""

    @property
    def computed(self) -> str:
        """Type of the computation."""
        return computed_dtype(self.dtype)


class GatedProblem(NamedTuple):
    """Everything about a call that decides its result, except the values in the arrays."""

    traits: GatedTraits
    num_sequences: int
    seqlen: int
    """Tokens of each sequence; for packed ones the total."""
    num_heads: int
    """Of q and k."""
    num_heads_v: int
    num_chunks: int
    """Rows of `states`; 0 without."""
    scale: float
    strides: GatedStrides
    cu_seqlens_dtype: str
    """"" where there are none."""

    def __str__(self) -> str:
        traits = self.traits
        recurrent = traits.op == "recurrent_gated_delta_rule"
        other_dim = traits.head_dim_v != traits.head_dim
        parts = [
            f"{traits.op} {traits.dtype}",
            f"packed sequences {self.num_sequences}" if traits.packed else f"batch {self.num_sequences}",
            f"heads {self.num_heads}/{self.num_heads_v}, tokens {self.seqlen}",
            f"head_dim {traits.head_dim}" + (f"/{traits.head_dim_v}" if other_dim else ""),
        ]
        if traits.chunk_size:
            parts.append(f"chunks of {traits.chunk_size}")
        if self.strides.states is not None:
            parts.append(f"states {traits.state_dtype}")
        if not recurrent:
            parts += [name for name in ("initial_state", "final_state") if getattr(self.strides, name) is not None]
        return ", ".join(parts)
