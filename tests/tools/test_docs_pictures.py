"""Pictures of the documents show what the package computes now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("matplotlib")

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_masks", DOCS / "draw_masks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def squares(picture: ElementTree.Element, n: int) -> np.ndarray:
    """Centres of the squares of panel n, in points from the picture's upper left corner."""
    group = picture.find(f".//{SVG}g[@id='visible_{n}']")
    assert group is not None
    return np.array([[float(use.attrib["x"]), float(use.attrib["y"])] for use in group.iter(f"{SVG}use")])


def test_stored_squares_are_the_keys_that_attention_sees(script: ModuleType) -> None:
    picture = ElementTree.parse(script.PICTURE).getroot()
    figure = script.draw()
    points = 72 / figure.dpi
    for n, (axes, panel) in enumerate(zip(figure.axes, script.PANELS, strict=True)):
        axes.apply_aspect()
        query, key = np.nonzero(script.visible_keys(*panel))
        expected = points * axes.transData.transform(np.stack([key + 0.5, query + 0.5], axis=1))
        expected[:, 1] = 72 * figure.get_figheight() - expected[:, 1]
        np.testing.assert_allclose(squares(picture, n), expected, atol=0.5, err_msg=script.title(*panel))


def test_stored_titles_are_those_of_the_panels(script: ModuleType) -> None:
    texts = {"".join(text.itertext()).strip() for text in ElementTree.parse(script.PICTURE).iter(f"{SVG}text")}
    for panel in script.PANELS:
        assert set(script.title(*panel).split("\n")) <= texts


def test_keys_that_attention_sees_are_those_of_the_formula(script: ModuleType) -> None:
    for seqlen_q, seqlen_k, options in script.PANELS:
        offset = options.get("query_offset", 0 if options.get("causal") == "top_left" else seqlen_k - seqlen_q)
        position, key = offset + np.arange(seqlen_q)[:, np.newaxis], np.arange(seqlen_k)
        left, right = options.get("window", (None, None))
        expected = np.ones((seqlen_q, seqlen_k), bool)
        if options.get("causal"):
            expected &= key <= position
        if left is not None:
            expected &= key >= position - left
        if right is not None:
            expected &= key <= position + right
        np.testing.assert_array_equal(script.visible_keys(seqlen_q, seqlen_k, options), expected)


def test_picture_is_the_same_in_every_run(script: ModuleType, tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        script.save(tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
