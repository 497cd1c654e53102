"""The sentence encoder among the examples: the vectors of transformers, padded or ragged, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = Path(__file__).resolve().parent / "data"
FOLDER = DATA / "tiny_bert"
STORED = json.loads((DATA / "tiny_bert_vectors.json").read_text(encoding="utf-8"))
SENTENCES, EXPECTED = list(STORED), np.array(list(STORED.values()))
TOLERANCE = 1e-6
"""Of entries of vectors of length 1: two ways to compute two layers in float32."""


@pytest.fixture
def sentence_encoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "sentence_encoder", raising=False)
    import sentence_encoder

    return sentence_encoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | entries), encoding="utf-8")


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "padded"])
def test_vectors_are_those_of_transformers(sentence_encoder: Any, ragged: bool, batch_size: int) -> None:
    vectors = sentence_encoder.SentenceEncoder(FOLDER).encode(SENTENCES, ragged=ragged, batch_size=batch_size)
    assert vectors.dtype == np.float32
    assert abs(vectors - EXPECTED).max() < TOLERANCE
    different = np.delete(EXPECTED, SENTENCES.index("beautiful  is BETTER than Ugly ."), axis=0)
    distances = np.linalg.norm(different[:, None] - different, axis=-1)
    assert distances[~np.eye(len(different), dtype=bool)].min() > 1000 * TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "padded"])
def test_a_gpu_gives_the_same_vectors(sentence_encoder: Any, ragged: bool) -> None:
    cupy = pytest.importorskip("cupy")
    vectors = sentence_encoder.SentenceEncoder(FOLDER, cupy).encode(SENTENCES, ragged=ragged, batch_size=3)
    assert isinstance(vectors, cupy.ndarray)
    assert abs(cupy.asnumpy(vectors) - EXPECTED).max() < 2 * TOLERANCE


def test_prefix_of_names_and_float32_are_taken(sentence_encoder: Any, folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights = {f"bert.{name}": x.astype(np.float32) for name, x in load_file(FOLDER / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    assert abs(sentence_encoder.SentenceEncoder(folder).encode(SENTENCES) - EXPECTED).max() < TOLERANCE


def test_every_weight_counts(sentence_encoder: Any) -> None:
    encoder = sentence_encoder.SentenceEncoder(FOLDER)
    for name, x in encoder.weights.items():
        if name.endswith("self.key.bias"):
            continue  # adds the same to all scores of a query
        encoder.weights[name] = x * np.float32(1.1)
        assert abs(encoder.encode(SENTENCES) - EXPECTED).max() > 100 * TOLERANCE, name
        encoder.weights[name] = x


def test_sentences_are_cut_at_the_positions_that_there_are(sentence_encoder: Any, folder: Path) -> None:
    long = max(SENTENCES, key=len)
    (folder / "sentence_bert_config.json").unlink()
    encoder = sentence_encoder.SentenceEncoder(folder)
    positions = encoder.weights["embeddings.position_embeddings.weight"]
    assert len(encoder.tokenizer.encode(long).ids) == len(positions) == 64
    assert abs(encoder.encode([long]) - EXPECTED[SENTENCES.index(long)]).max() > 100 * TOLERANCE


def test_no_sentences_give_no_vectors(sentence_encoder: Any) -> None:
    assert sentence_encoder.SentenceEncoder(FOLDER).encode([]).shape == (0, 32)


def test_a_single_string_is_refused(sentence_encoder: Any) -> None:
    with pytest.raises(TypeError, match="sentences is a str, expected a sequence"):
        sentence_encoder.SentenceEncoder(FOLDER).encode("Now is better than never.")


def test_what_is_no_sentence_is_refused(sentence_encoder: Any) -> None:
    encoder = sentence_encoder.SentenceEncoder(FOLDER)
    with pytest.raises(TypeError, match=r"sentences\[1\] is a tuple, expected a str"):
        encoder.encode(["a", ("a", "b")])
    with pytest.raises(ValueError, match="batch_size is -1, expected at least 1"):
        encoder.encode(["a", "b"], batch_size=-1)


@pytest.mark.parametrize(
    ("file", "entries", "message"),
    [
        ("config.json", {"model_type": "mpnet"}, "model_type of .* is 'mpnet', expected 'bert'"),
        ("config.json", {"position_embedding_type": "relative_key"}, "is 'relative_key', expected 'absolute'"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act of .* is 'relu', expected 'gelu'"),
        ("config.json", {"is_decoder": True}, "expected False"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "expected pooling_mode_mean_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "expected pooling_mode_mean_tokens"),
    ],
)
def test_other_models_are_refused(
    sentence_encoder: Any, folder: Path, file: str, entries: dict[str, object], message: str
) -> None:
    change(folder / file, **entries)
    with pytest.raises(ValueError, match=message):
        sentence_encoder.SentenceEncoder(folder)
