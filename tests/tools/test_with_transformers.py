"""The example with transformers: on a GPU, with NumPy in its place, and what it says without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cuflash

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "with_transformers.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": python_path}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


def test_says_what_is_missing() -> None:
    start = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    result = run("-c", start)
    assert result.returncode == 1
    assert result.stderr.startswith("This example needs torch and transformers (pip install torch transformers): ")
    assert result.stderr.count("\n") == 1


@pytest.mark.gpu
def test_runs_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU")
    result = run(str(EXAMPLE))
    assert result.returncode == 0, result.stderr
    assert "the same tokens generated: True" in result.stdout


@pytest.fixture
def attend_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the example, with CPU tensors taken as NumPy arrays: only arguments and masks are looked at."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.delitem(sys.modules, "with_transformers", raising=False)
    import with_transformers

    attention = cuflash.attention

    def on_host(*arrays: Any, **options: Any) -> Any:
        options = {name: x.detach().numpy() if hasattr(x, "numpy") else x for name, x in options.items()}
        return attention(*(x.numpy() for x in arrays), **options)

    monkeypatch.setattr(cuflash, "attention", on_host)
    with_transformers.register()


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": {"num_key_value_heads": 2},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 5.0},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6, "num_local_experts": 4},
    "bert": {},
    "splinter": {},
    "layoutlm": {},
}
ENCODERS = ("bert", "splinter", "layoutlm")


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", MODELS)
def test_agrees_with_eager_attention(kind: str, cache: str | None, attend_on_host: None) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    generates = kind not in ENCODERS
    auto = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **SMALL, **MODELS[kind])).float().eval()
    tokens = torch.randint(3, 64, (2, 12))
    for padding in (0, 4):
        mask = torch.ones_like(tokens)
        mask[0, :padding] = 0
        results = []
        for name in ("eager", "fused"):
            model.set_attn_implementation(name)
            with torch.no_grad():
                found = [model(tokens, attention_mask=mask)[0][mask.bool()]]
                if generates:
                    how = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "pad_token_id": 0}
                    how |= {"return_dict_in_generate": True, "cache_implementation": cache, "disable_compile": True}
                    generated = model.generate(tokens, attention_mask=mask, eos_token_id=None, **how)
                    found += [*generated.scores, generated.sequences.float()]
            results.append(found)
        for expected, ours in zip(*results, strict=True):
            assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


def test_agrees_where_positions_have_a_bias(attend_on_host: None) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, initializer_factor=3.0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    tokens = torch.randint(3, 64, (2, 12))
    mask = torch.ones_like(tokens)
    mask[0, 8:] = 0
    results = []
    for name in ("eager", "fused"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results.append(model(tokens, attention_mask=mask, decoder_input_ids=tokens[:, :7]).logits)
    expected, ours = results
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "dropout"])
def test_what_is_not_passed_on_is_refused(name: str, attend_on_host: None) -> None:
    import torch
    import with_transformers

    x = torch.ones(1, 2, 5, 8)
    with pytest.raises(ValueError, match=f"^{name} is not passed on to cuflash, expected a model without it"):
        with_transformers.attend(None, x, x, x, None, **{name: 0.1 if name == "dropout" else torch.zeros(1, 5, 3)})
