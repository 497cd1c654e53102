"""cuflash inside `transformers`, for those who have torch with CUDA: `register` is all of it.

    import with_transformers

    with_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fused").cuda()

It is for inference (`torch.no_grad()`, as in `generate`), on torch's default stream, which is CuPy's, too. Tensors are
taken through DLPack and written in place: nothing is copied.

It serves models that ask transformers' interface for their attention. Those that write it out themselves (BLOOM, MPT,
Falcon, Longformer, GPT-Neo, DeBERTa, the encoder of SAM) never do: they stay eager without a word, or refuse the name.
Sliding windows go in as masks here; `window=` of `cuflash.attention` takes half the time or less.

With a GPU, `python examples/with_transformers.py` compares a small model with random weights with the "eager" attention
of transformers.
"""

from __future__ import annotations

import sys
from typing import Any

import cuflash

try:
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
    from transformers.masking_utils import sdpa_mask
except ImportError as error:
    sys.exit(f"This example needs torch and transformers (pip install torch transformers): {error}.")

NAME = "fused"
"""Not cuflash: what has "flash" in its name is looked for among kernels of flash-attn."""
REFUSED = ("indices", "block_indices", "sinks")
"""What changes a result and cuflash has not: choices of keys that are in no mask, and sinks of single queries."""


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    is_causal: bool | None = None,
    position_bias: Any = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Any, None]:
    """Take (batch, heads, tokens, head_dim), as transformers calls it, and return (batch, tokens, heads, head_dim_v).

    A sliding window is part of the mask. Without one, a causal call with more keys than queries is the first of a cache
    of fixed size, whose rows behind the queries are still empty.
    """
    given = [name for name in REFUSED if others.get(name) is not None] + ["dropout"] * bool(dropout)
    if given:
        raise ValueError(f"{given[0]} is not passed on to cuflash, expected a model without it")
    batch, heads, tokens, _ = query.shape
    out = query.new_empty(batch, tokens, heads, value.shape[-1])
    is_causal = getattr(module, "is_causal", False) if is_causal is None else is_causal
    causal = "top_left" if is_causal and attention_mask is None and tokens > 1 else False
    mask, bias = attention_mask, position_bias
    if mask is not None and mask.dtype != torch.bool:  # it is added to the scores
        mask, bias = None, mask if bias is None else mask + bias
    options = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "mask": mask, "bias": bias, "causal": causal}
    cuflash.attention(query, key, value, out=out.transpose(1, 2), **options)
    return out, None


def register() -> None:
    """Make `attn_implementation="fused"` known; `sdpa_mask` makes masks of bool, True where a key is seen."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("This example needs a GPU that torch can use: cuflash does not take torch tensors on the CPU.")
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).cuda().eval()
    tokens = torch.randint(3, 256, (3, 40), device="cuda")
    mask = torch.ones_like(tokens)
    mask[1, :15] = 0  # padded on the left, as for generation
    results = {}
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask).logits[mask.bool()]
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
        results[name] = logits, generated
    (logits, generated), (ours, ours_generated) = results.values()
    error = float((ours - logits).abs().max() / logits.abs().max())
    print(f"{torch.cuda.get_device_name()}: logits differ by {error:.1e} of the largest")
    print(f"the same tokens generated: {torch.equal(generated, ours_generated)}")
    if error > 1e-4:
        sys.exit("That is more than rounding.")


if __name__ == "__main__":
    main()
