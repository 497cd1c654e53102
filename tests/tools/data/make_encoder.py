"""Write `tiny_bert`, a sentence encoder with random weights, and the vectors that transformers computes with it.

    pip install torch transformers
    python tests/tools/data/make_encoder.py

The folder has the layout of all-MiniLM-L6-v2, and the same architecture, only smaller. Its tokenizer knows the words of
the Zen of Python; its weights mean nothing.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

with contextlib.redirect_stdout(io.StringIO()):
    import this

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "tiny_bert"
ZEN = codecs.decode(this.s, "rot13").splitlines()
SENTENCES = [
    "",
    "Now",
    "Beautiful is better than ugly.",
    "beautiful  is BETTER than Ugly .",
    "ugly is better than beautiful.",
    "How should errors be handled?",
    "Ünïcode, 漢字 and words that no tokenizer has seen: zygomorphic",
    " ".join(ZEN),
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB_SIZE = 144


def make_tokenizer() -> Tokenizer:
    """Return one that knows the letters and words of the text; it is counted, as training breaks ties at random."""
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for line in ZEN for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(line)))
    letters = sorted(set("".join(words)))
    pieces = [*SPECIAL, *letters, *(f"##{x}" for x in letters), *sorted(words, key=lambda word: (-words[word], word))]
    vocabulary = list(dict.fromkeys(pieces))[:VOCAB_SIZE]
    tokenizer = Tokenizer(models.WordPiece({x: i for i, x in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    return tokenizer


def make_model() -> BertModel:
    """Return a model of which no weight is 0 or 1, so that one that is forgotten or mistaken shows in the vectors."""
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    rng = np.random.default_rng(0)
    for name, x in model.named_parameters():
        mean, spread = (1, 0.1) if name.endswith("LayerNorm.weight") else (0, 0.1)
        if "word_embeddings" in name:
            spread = 1  # words count most: sentences that have some in common are alike
        elif x.ndim == 2 and "embeddings" not in name:
            # Scores spread widely enough for attention to be neither uniform nor on one key.
            spread = (2 if "query" in name or "key" in name else 0.7) / x.shape[-1] ** 0.5
        drawn = rng.normal(mean, spread, x.shape)
        x.data = torch.tensor(drawn.astype(np.float16).astype(np.float32))
    return model


def encode(model: BertModel, tokenizer: Tokenizer, sentence: str) -> list[float]:
    ids = tokenizer.encode(sentence).ids
    with torch.no_grad():
        mean = model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
    return [round(float(x), 8) for x in mean / mean.norm()]


def write_json(path: Path, content: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(x)}" for name, x in content.items())
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = make_model()
    max_seq_length = 48
    # The encoder must undo both: sentence-transformers has its own truncation, and padding changes a mean.
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(32)
    FOLDER.mkdir(exist_ok=True)
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_seq_length)
    write_json(HERE / "tiny_bert_vectors.json", {s: encode(model, tokenizer, s) for s in SENTENCES})
    write_json(FOLDER / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})
    write_json(FOLDER / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    model.half().save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
