"""Read handwritten digits by attention alone: the job of the demo, as arrays and numbers.

Attention with the softmax over distances is kernel regression: each held-out image asks every training image how much
it looks like it, and the answers are averaged. Nothing is trained.

* queries: 597 held-out images of scikit-learn's bundled digits, keys: 1200 training images, head_dim 64 (8 x 8 pixels)
* values: the labels, one-hot, so that the result is a probability for each of the ten digits
* scale: 1 / temperature. Images are scaled to unit length, so that |q - k|^2 = 2 - 2 q.k, and the Gaussian weight
  exp(-|q - k|^2 / 2T) is exp(q.k / T) up to a factor that the softmax removes: the dot products of attention suffice.
* lse: up to a constant the log of a kernel density estimate, that is how well the training images cover the query.

The images stand in the file writer by writer and are split in that order, so that most held-out writers are new.
Functions take the array library `xp` (numpy or cupy) that the attention runs on; their results are NumPy arrays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .. import reference
from ..bench.device import peak_bytes
from ..bench.inputs import to_host
from ..dense import attention

NUM_TRAINING = 1200
NUM_VALIDATION = 300
"""The last training images, on which the temperature is chosen; held-out images play no part in it."""
NUM_CLASSES = 10
INVERSE_TEMPERATURES = (10, 20, 30, 40, 60, 80, 100, 120, 160, 200, 300, 400)
MARGIN = 2.0
"""An error may be this many times that of `naive_attention` in float32."""


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: `images` (n, 64) as scanned (0 to 16), `labels` (n,)."""

    images: np.ndarray
    labels: np.ndarray

    def __getitem__(self, rows: Any) -> Digits:
        return Digits(self.images[rows], self.labels[rows])

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def vectors(self) -> np.ndarray:
        """The images scaled to unit length, float32."""
        unit: np.ndarray = self.images / np.linalg.norm(self.images, axis=1, keepdims=True)
        return unit.astype(np.float32)

    @property
    def one_hot(self) -> np.ndarray:
        """(n, 10) float32, 1 in the column of the label."""
        rows: np.ndarray = np.eye(NUM_CLASSES, dtype=np.float32)[self.labels]
        return rows


@dataclass(frozen=True)
class Reading:
    """What attention says about some images: `probabilities` (n, 10) and `lse` (n,)."""

    probabilities: np.ndarray
    lse: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """The most probable digit of each image."""
        most_probable: np.ndarray = self.probabilities.argmax(axis=1)
        return most_probable


def load() -> tuple[Digits, Digits]:
    """The training and the held-out images."""
    from sklearn.datasets import load_digits

    digits = Digits(*load_digits(return_X_y=True))
    return digits[:NUM_TRAINING], digits[NUM_TRAINING:]


def operands(xp: ModuleType, queries: Digits, training: Digits) -> tuple[Any, Any, Any]:
    """(q, k, v) on the device of `xp`."""
    return xp.asarray(queries.vectors), xp.asarray(training.vectors), xp.asarray(training.one_hot)


def read(xp: ModuleType, queries: Digits, training: Digits, temperature: float) -> Reading:
    """Classify `queries` by attention to `training`."""
    q, k, v = operands(xp, queries, training)
    out, lse = attention(q, k, v, scale=1 / temperature, return_lse=True)
    return Reading(to_host(out), to_host(lse))


def log_loss(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Mean of -ln(probability of the true digit)."""
    of_truth = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(of_truth, np.finfo(np.float32).tiny)).mean())


def validation_losses(xp: ModuleType, training: Digits) -> dict[float, float]:
    """Log loss by temperature, on the last training images when the others are the keys."""
    keys, validation = training[:-NUM_VALIDATION], training[-NUM_VALIDATION:]
    return {
        1 / inverse: log_loss(read(xp, validation, keys, 1 / inverse).probabilities, validation.labels)
        for inverse in INVERSE_TEMPERATURES
    }


def choose_temperature(xp: ModuleType, training: Digits) -> float:
    """The temperature with the least validation loss."""
    losses = validation_losses(xp, training)
    return min(losses, key=lambda temperature: losses[temperature])


def accuracy(labels: np.ndarray, truth: np.ndarray) -> float:
    """Fraction of labels that are right."""
    return float((labels == truth).mean())


def baselines(training: Digits, queries: Digits) -> dict[str, float]:
    """Accuracy of two scikit-learn classifiers on the raw pixels."""
    from sklearn.dummy import DummyClassifier
    from sklearn.neighbors import KNeighborsClassifier

    classifiers = {
        "nearest neighbour": KNeighborsClassifier(n_neighbors=1),
        "most frequent digit": DummyClassifier(strategy="most_frequent"),
    }
    return {
        name: accuracy(classifier.fit(training.images, training.labels).predict(queries.images), queries.labels)
        for name, classifier in classifiers.items()
    }


def relative_error(got: np.ndarray, exact: np.ndarray) -> float:
    """Largest difference over largest value."""
    return float(np.abs(got - exact).max() / np.abs(exact).max())


def naive_attention(xp: ModuleType, q: Any, k: Any, v: Any, scale: float) -> tuple[Any, Any]:
    """The formula as one writes it down, with the whole matrix of scores in memory: (out, lse)."""
    scores = q @ k.T
    scores *= np.float32(scale)
    row_max = scores.max(axis=1, keepdims=True)
    scores -= row_max
    xp.exp(scores, out=scores)
    row_sum = scores.sum(axis=1, keepdims=True)
    return scores @ v / row_sum, (row_max + xp.log(row_sum))[:, 0]


def errors(reading: Reading, queries: Digits, training: Digits, temperature: float) -> dict[str, tuple[float, float]]:
    """For "out" and "lse": the error against float64, and the most that is allowed.

    Allowed is `MARGIN` times the error of naive attention in float32.
    """
    q, k, v = operands(np, queries, training)
    exact_out, exact_lse = reference.attention(q, k, v, scale=1 / temperature)
    naive_out, naive_lse = naive_attention(np, q, k, v, 1 / temperature)
    return {
        "out": (relative_error(reading.probabilities, exact_out), MARGIN * relative_error(naive_out, exact_out)),
        "lse": (relative_error(reading.lse, exact_lse), MARGIN * relative_error(naive_lse, exact_lse)),
    }


def scrambled(digits: Digits) -> Digits:
    """The same grey values in random order: what no digit looks like."""
    return Digits(np.random.default_rng(0).permuted(digits.images, axis=1), digits.labels)


def lse_without_each_class(xp: ModuleType, queries: Digits, training: Digits, temperature: float) -> np.ndarray:
    """(10, n): the lse of the queries where row c hides the training images of digit c.

    One call: a leading axis of ten masks, along which queries, keys and values are repeated with stride 0.
    """
    q, k, v = operands(xp, queries, training)
    visible = xp.asarray(np.arange(NUM_CLASSES)[:, None, None, None] != training.labels)
    repeated = [xp.broadcast_to(x, (NUM_CLASSES, 1, *x.shape)) for x in (q, k, v)]
    _, lse = attention(*repeated, mask=visible, scale=1 / temperature, return_lse=True)
    return to_host(lse)[:, 0]


def novelty_auroc(lse_known: np.ndarray, lse_new: np.ndarray) -> float:
    """How often a known image has a larger lse than a new one: 1 is perfect, 0.5 is guessing."""
    from sklearn.metrics import roc_auc_score

    known = np.repeat([1, 0], [len(lse_known), len(lse_new)])
    return float(roc_auc_score(known, np.concatenate([lse_known, lse_new])))


def unseen_class_auroc(xp: ModuleType, queries: Digits, training: Digits, temperature: float) -> np.ndarray:
    """(10,): novelty score of each digit when the training images do not contain it."""
    lse = lse_without_each_class(xp, queries, training, temperature)
    return np.array(
        [novelty_auroc(lse[c, queries.labels != c], lse[c, queries.labels == c]) for c in range(NUM_CLASSES)]
    )


def hardest(reading: Reading, labels: np.ndarray, count: int) -> np.ndarray:
    """The images whose true digit got the least probability, hardest first."""
    return np.argsort(reading.probabilities[np.arange(len(labels)), labels], kind="stable")[:count]


def most_attended(
    queries: Digits, reading: Reading, training: Digits, temperature: float, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(n, count) training images with the largest weights for each query, and these weights.

    Attention never stores its weights. The lse brings those of a few queries back: weight = exp(score - lse).
    """
    weights = np.exp(queries.vectors @ training.vectors.T / temperature - reading.lse[:, None])
    order = np.argsort(-weights, axis=1, kind="stable")[:, :count]
    return order, np.take_along_axis(weights, order, axis=1)


def median_time(xp: ModuleType, call: Callable[[], Any], repeats: int = 9) -> float:
    """Median seconds of a finished call, after one that warms up."""
    wait = (lambda: None) if xp is np else xp.cuda.get_current_stream().synchronize
    time.sleep(0.2)  # threads of what ran before, as OpenBLAS's, spin for a while
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def costs(xp: ModuleType, queries: Digits, training: Digits, temperature: float) -> dict[str, tuple[float, int]]:
    """Seconds of a call and its peak memory in bytes, for cuflash and for naive attention with the same library."""
    q, k, v = operands(xp, queries, training)
    name = {"numpy": "NumPy", "cupy": "CuPy"}[xp.__name__]
    calls: dict[str, Callable[[], Any]] = {
        "cuflash": lambda: attention(q, k, v, scale=1 / temperature, return_lse=True),
        f"naive {name}": lambda: naive_attention(xp, q, k, v, 1 / temperature),
    }
    return {name: (median_time(xp, call), peak_bytes(xp, call)) for name, call in calls.items()}
