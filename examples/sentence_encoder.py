"""A BERT-style sentence encoder without torch: safetensors and tokenizers read its folder, cuflash attends.

It loads the folder that sentence-transformers writes for models such as all-MiniLM-L6-v2: BERT, a mean over the tokens
of each sentence, and vectors of length 1. So the dot product of two vectors says how alike two sentences are.
[search.ipynb](search.ipynb) uses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

import cuflash

Attend = Callable[[Any, Any, Any], Any]
"""q, k, v (..., tokens, heads, head_dim) -> what the tokens of each sentence see in it, of the same shape."""


class SentenceEncoder:
    """Sentences to vectors of length 1, in float32.

    Parameters
    ----------
    folder : str or Path
        With `config.json`, `tokenizer.json` and `model.safetensors`; `sentence_bert_config.json`, if there is one, says
        how many tokens of a sentence are read.
    xp : module, optional
        ``numpy`` (the default) or ``cupy``.

    Raises
    ------
    ValueError
        If the model is of another kind than those that are computed here.
    """

    def __init__(self, folder: str | Path, xp: ModuleType = np) -> None:
        folder = Path(folder)
        config = read_json(folder / "config.json")
        self.xp: Any = xp
        check(config, folder)
        self.activation = gelu(xp)
        self.num_layers, self.num_heads = config["num_hidden_layers"], config["num_attention_heads"]
        self.eps = config.get("layer_norm_eps", 1e-12)
        self.weights = {
            name.removeprefix("bert."): xp.asarray(x.astype(np.float32))
            for name, x in load_file(folder / "model.safetensors").items()
        }
        longest = config["max_position_embeddings"]
        if (folder / "sentence_bert_config.json").exists():
            longest = min(longest, read_json(folder / "sentence_bert_config.json").get("max_seq_length") or longest)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(longest)

    def encode(self, sentences: Sequence[str], *, ragged: bool = True, batch_size: int = 64) -> Any:
        """Return one vector for each sentence, (sentences, hidden_size).

        Parameters
        ----------
        sentences : sequence of str
        ragged : bool, optional
            Whether the sentences of a batch are packed one behind the other, or each is padded to the longest. The
            vectors are the same, to rounding.
        batch_size : int, optional
            Sentences that are computed together; those of about the same length are.
        """
        if isinstance(sentences, str):
            raise TypeError("sentences is a str, expected a sequence of them")
        for i, sentence in enumerate(sentences):
            if not isinstance(sentence, str):
                raise TypeError(f"sentences[{i}] is a {type(sentence).__name__}, expected a str")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, expected at least 1")
        xp, forward = self.xp, self.forward_ragged if ragged else self.forward_padded
        tokens = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        vectors = xp.empty((len(tokens), self.weights["embeddings.word_embeddings.weight"].shape[1]), np.float32)
        for start in range(0, len(tokens), batch_size):
            batch = order[start : start + batch_size]
            mean = forward([tokens[i] for i in batch])
            vectors[xp.asarray(batch)] = mean / xp.linalg.norm(mean, axis=-1, keepdims=True)
        return vectors

    def forward_padded(self, tokens: list[list[int]]) -> Any:
        """Return the mean over the tokens of each sentence; a mask hides what they were padded with."""
        xp, lengths = self.xp, np.array([len(x) for x in tokens])
        ids = np.zeros((len(tokens), lengths.max()), np.int64)
        for row, sentence in zip(ids, tokens, strict=True):
            row[: len(sentence)] = sentence
        positions = np.arange(ids.shape[1])
        is_token = xp.asarray(positions < lengths[:, None])

        def attend(q: Any, k: Any, v: Any) -> Any:
            mask = is_token[:, None, None, :]  # the same for all heads and queries
            out = cuflash.attention(q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2), mask=mask)
            return out.swapaxes(1, 2)

        x = self.layers(xp.asarray(ids), xp.asarray(positions), attend)
        return (x * is_token[..., None]).sum(axis=1) / xp.asarray(lengths[:, None].astype(np.float32))

    def forward_ragged(self, tokens: list[list[int]]) -> Any:
        """Return the mean over the tokens of each sentence; all of them are packed, and none is computed in vain."""
        xp, lengths = self.xp, np.array([len(x) for x in tokens])
        cu_seqlens = xp.asarray(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
        longest = int(lengths.max())

        def attend(q: Any, k: Any, v: Any) -> Any:
            return cuflash.attention_varlen(q, k, v, cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)

        positions = np.concatenate([np.arange(length) for length in lengths])
        x = self.layers(xp.asarray(np.concatenate(tokens)), xp.asarray(positions), attend)
        return xp.add.reduceat(x, cu_seqlens[:-1], axis=0) / xp.asarray(lengths[:, None].astype(np.float32))

    def layers(self, ids: Any, positions: Any, attend: Attend) -> Any:
        """Return the last hidden states, (*ids.shape, hidden_size); only `attend` knows where sentences end."""
        x = self.weights["embeddings.word_embeddings.weight"][ids]
        x = x + self.weights["embeddings.position_embeddings.weight"][positions]
        x = self.normalise("embeddings.LayerNorm", x + self.weights["embeddings.token_type_embeddings.weight"][0])
        for i in range(self.num_layers):
            layer = f"encoder.layer.{i}"
            q, k, v = (self.linear(f"{layer}.attention.self.{name}", x) for name in ("query", "key", "value"))
            heads = (*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads)
            seen = attend(q.reshape(heads), k.reshape(heads), v.reshape(heads)).reshape(x.shape)
            seen = self.linear(f"{layer}.attention.output.dense", seen)
            x = self.normalise(f"{layer}.attention.output.LayerNorm", x + seen)
            inner = self.activation(self.linear(f"{layer}.intermediate.dense", x))
            x = self.normalise(f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", inner))
        return x

    def linear(self, name: str, x: Any) -> Any:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def normalise(self, name: str, x: Any) -> Any:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / self.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + self.eps)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def check(config: dict[str, Any], folder: Path) -> None:
    """Raise ValueError for models whose vectors would come out wrong."""
    wanted = {
        "model_type": "bert",
        "position_embedding_type": "absolute",
        "hidden_act": "gelu",
        "is_decoder": False,
    }
    for name, expected in wanted.items():
        if config.get(name, expected) != expected:
            raise ValueError(f"{name} of {folder / 'config.json'} is {config[name]!r}, expected {expected!r}")
    pooling = folder / "1_Pooling" / "config.json"
    modes = [name for name, on in read_json(pooling).items() if on is True] if pooling.exists() else []
    modes = [name for name in modes if name.startswith("pooling_mode")]
    if pooling.exists() and modes != ["pooling_mode_mean_tokens"]:
        raise ValueError(f"{pooling} has {' and '.join(modes) or 'no pooling mode'}, expected pooling_mode_mean_tokens")


def gelu(xp: ModuleType) -> Callable[[Any], Any]:
    """Return x times the normal distribution function of x, the exact form, for arrays of `xp`."""
    if xp is np:
        from scipy.special import erf
    else:
        from cupyx.scipy.special import erf

    return lambda x: 0.5 * x * (1 + erf(x * np.float32(0.5**0.5)))
