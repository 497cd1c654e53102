"""The digits job: that it runs, that its claims are measured, and that it fails when attention is wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from cuflash import demo

TEMPERATURE = 1 / 100


@pytest.fixture(scope="module")
def digits() -> tuple[demo.Digits, demo.Digits]:
    return demo.load()


@pytest.mark.parametrize("backend", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_runs_and_saves_a_picture(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "digits.png"
    assert demo.main(["--backend", backend, "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for part in ("accuracy", "nearest neighbour", "most frequent digit", "error against float64", "time", str(picture)):
        assert part in printed
    assert "FAILED" not in printed


def test_split_holds_every_digit_once(digits: tuple[demo.Digits, demo.Digits]) -> None:
    training, held_out = digits
    assert (len(training), len(held_out)) == (1200, 597)
    assert set(training.labels) == set(held_out.labels) == set(range(10))
    np.testing.assert_allclose(np.linalg.norm(training.vectors, axis=1), 1, rtol=1e-6)


def test_beats_the_baseline_and_rivals_the_nearest_neighbour(digits: tuple[demo.Digits, demo.Digits]) -> None:
    training, held_out = digits
    reading = demo.read(np, held_out, training, TEMPERATURE)
    others = demo.baselines(training, held_out)
    ours = demo.accuracy(reading.labels, held_out.labels)
    assert others["most frequent digit"] < 0.2 < 0.95 < ours
    assert ours > others["nearest neighbour"] - 0.01
    np.testing.assert_allclose(reading.probabilities.sum(axis=1), 1, rtol=1e-5)


def test_lse_finds_new_kinds_of_images(digits: tuple[demo.Digits, demo.Digits]) -> None:
    training, held_out = digits
    known = demo.read(np, held_out, training, TEMPERATURE).lse
    assert demo.novelty_auroc(known, demo.read(np, demo.scrambled(held_out), training, TEMPERATURE).lse) > 0.99
    unseen = demo.unseen_class_auroc(np, held_out, training, TEMPERATURE)
    assert unseen.mean() > 0.95 and unseen.min() > 0.8


def test_masked_call_equals_training_images_left_out(digits: tuple[demo.Digits, demo.Digits]) -> None:
    training, held_out = digits
    lse = demo.lse_without_each_class(np, held_out, training, TEMPERATURE)
    for digit in (0, 7):
        kept = training[training.labels != digit]
        np.testing.assert_allclose(lse[digit], demo.read(np, held_out, kept, TEMPERATURE).lse, rtol=1e-6)


def test_lse_brings_the_weights_back(digits: tuple[demo.Digits, demo.Digits]) -> None:
    training, held_out = digits
    queries = held_out[:5]
    reading = demo.read(np, queries, training, TEMPERATURE)
    keys, weights = demo.most_attended(queries, reading, training, TEMPERATURE, len(training))
    scores = queries.vectors.astype(np.float64) @ training.vectors.T.astype(np.float64) / TEMPERATURE
    exact = np.take_along_axis(softmax(scores, axis=1), keys, axis=1)
    np.testing.assert_allclose(weights, exact, rtol=1e-4, atol=1e-30)
    assert (np.diff(weights, axis=1) <= 0).all()


def test_wrong_attention_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.attention

    def slightly_wrong(*args: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        out, lse = right(*args, **options)
        return out * np.float32(1.0001), lse

    monkeypatch.setattr(demo, "attention", slightly_wrong)
    monkeypatch.setattr(demo, "explain", lambda *args, **options: "")
    assert demo.main(["--backend", "numpy", "--output", str(tmp_path / "digits.png")]) == 1
    assert "TOO LARGE" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_names_the_extra_that_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert demo.main([]) == 2
    assert "cuflash[examples]" in capsys.readouterr().out


def test_cupy_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert demo.choose_backend("numpy") is np
    assert demo.main(["--backend", "cupy"]) == 2
    assert "cuflash[cuda12]" in capsys.readouterr().out
