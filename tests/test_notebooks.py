"""The notebooks run from top to bottom with NumPy, and stay small enough to be read on the web."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> Any:
    """Run a notebook with NumPy, as if on a machine without a GPU, and return it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=resources, record_timing=False)
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return client.execute(env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_without_a_gpu(path: Path, tmp_path: Path) -> None:
    execute(path, tmp_path)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_with_its_output(path: Path) -> None:
    assert path.stat().st_size < 300_000
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]


def store_outputs() -> None:
    """Run all notebooks and keep what they print and draw, without what differs from run to run."""
    for path in NOTEBOOKS:
        notebook = execute(path, path.parent)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)


if __name__ == "__main__":
    store_outputs()
