"""The digits job: that it runs, that its claims are measured, and that it fails when attention is wrong."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import cuflash
from cuflash.bench import outputs
from cuflash.bench.device import peak_bytes
from cuflash.demo import command, pictures
from cuflash.demo import digits as demo
from cuflash.gpu.installed import choose_backend

TEMPERATURE = 1 / 100


@pytest.fixture(scope="module")
def digits() -> tuple[demo.Digits, demo.Digits]:
    return demo.load()


@pytest.mark.parametrize("backend", ["numpy", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_runs_and_saves_a_picture(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "digits"  # matplotlib by itself would add a suffix
    assert command.main(["--backend", backend, "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for part in ("accuracy", "nearest neighbour", "most frequent digit", "error against float64", str(picture)):
        assert part in printed
    names = {"numpy": ("cuflash", "naive NumPy"), "gpu": ("cuflash", "naive CuPy")}
    for name in names[backend]:
        assert re.search(rf"^  {name} +[0-9.]+ ms, [0-9.]+ MiB$", printed, re.MULTILINE), printed
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


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_naive_attention_is_attention_and_takes_the_memory_of_its_scores(
    library: str, digits: tuple[demo.Digits, demo.Digits]
) -> None:
    xp = pytest.importorskip(library)
    training, held_out = digits
    q, k, v = demo.operands(xp, held_out, training)
    reading = demo.read(xp, held_out, training, TEMPERATURE)
    out, lse = demo.naive_attention(xp, q, k, v, 1 / TEMPERATURE)
    np.testing.assert_allclose(demo.to_host(out), reading.probabilities, atol=1e-4)
    np.testing.assert_allclose(demo.to_host(lse), reading.lse, rtol=1e-5)
    (ours, our_bytes), (naive, naive_bytes) = demo.costs(xp, held_out, training, TEMPERATURE).values()
    scores, results = 4 * len(q) * len(k), 4 * len(q) * 11
    assert min(ours, naive) > 0 and scores <= naive_bytes < 1.2 * scores
    assert results <= our_bytes < naive_bytes


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_peak_memory_counts_what_is_held_at_once(library: str) -> None:
    xp = pytest.importorskip(library)

    def call() -> None:
        x = xp.ones(1 << 20, np.uint8)
        y = x + x
        del x
        y + y

    assert 2 << 20 <= peak_bytes(xp, call) < (2 << 20) + 10_000


def test_picture_explains_itself(digits: tuple[demo.Digits, demo.Digits]) -> None:
    training, held_out = digits
    reading = demo.read(np, held_out, training, TEMPERATURE)
    caption = pictures.draw_hardest(held_out, reading, training, TEMPERATURE, count=2, neighbours=2).get_supxlabel()
    assert "digit: weight" in caption
    assert f"its median over all 597 held-out images is {np.median(reading.lse):.1f}" in caption


def test_wrong_attention_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.attention

    def slightly_wrong(*args: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        out, lse = right(*args, **options)
        return out * np.float32(1.0001), lse

    monkeypatch.setattr(demo, "attention", slightly_wrong)
    monkeypatch.setattr(command, "explain", lambda *args, **options: "")
    assert command.main(["--backend", "numpy", "--output", str(tmp_path / "digits.png")]) == 1
    assert "TOO LARGE" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["sklearn", "matplotlib"])
def test_names_what_is_missing(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert command.main([]) == 2
    assert "pip install matplotlib scikit-learn" in capsys.readouterr().out


def test_cupy_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert choose_backend("numpy") is np
    assert command.main(["--backend", "gpu"]) == 2
    assert "pip install 'cuflash[cuda1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "words"),
    [("nowhere/digits.png", "No such file"), (".", "Is a directory"), ("digits.doc", "suffix '.doc'")],
)
def test_output_that_cannot_be_written_fails_before_anything_is_computed(
    output: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "load", None)
    path = f"{tmp_path}/{output}"
    assert command.main(["--backend", "numpy", "--output", path]) == 2
    printed = capsys.readouterr().out
    assert printed.startswith(f"--output {path}: ") and words in printed
    assert not list(tmp_path.iterdir())


def test_kernel_that_cannot_serve_it_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cuflash.options(kernel="forward_mma"):
        assert command.main(["--backend", "numpy", "--output", f"{tmp_path}/digits.png"]) == 2
    assert capsys.readouterr().out.startswith("CUFLASH_KERNEL or CUFLASH_TILE: kernel 'forward_mma' cannot serve")
    assert not list(tmp_path.iterdir())


def test_checking_the_output_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "digits.png"
    outputs.check_picture(path)
    assert not path.exists()
    path.write_bytes(b"before")
    outputs.check_picture(path)
    assert path.read_bytes() == b"before"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="nothing is read-only for this user")
def test_output_into_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        outputs.check_picture(tmp_path / "digits.png")
