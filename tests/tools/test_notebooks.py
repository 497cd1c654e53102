"""The notebooks run from top to bottom with NumPy, print what they show, and are small enough to be read on the web."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest

import cuflash

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MACHINE_DEPENDENT = "machine-dependent"
"""Tag of cells whose text other machines need not repeat: times, numbers of threads, registers, single roundings."""


def execute(path: Path, folder: Path) -> Any:
    """Run a notebook with NumPy, as if on a machine without a GPU, and return it with its outputs.

    Modules beside the notebook are found, as they are in Jupyter, also where the folder is another one.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    client = nbclient.NotebookClient(notebook, timeout=300, resources=resources, record_timing=False)
    python_path = os.pathsep.join(filter(None, [str(ROOT), str(path.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": python_path}
    if "PYTEST_XDIST_WORKER" in env:
        env["OPENBLAS_NUM_THREADS"] = "1"  # others would wait at full speed, on cores where other tests run
    return client.execute(env=env)


def printed(cell: Any) -> str:
    """The text of a cell's outputs, as a reader sees it."""
    return "".join(
        output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "") + "\n"
        for output in cell.outputs
    )


def stale(stored: Any, executed: Any) -> list[str]:
    """Differences between the stored text and that of an execution, where it does not depend on the machine."""
    return [
        f"{cell.id}: stored {printed(cell)!r}, now {printed(again)!r}"
        for cell, again in zip(stored.cells, executed.cells, strict=True)
        if cell.cell_type == "code" and MACHINE_DEPENDENT not in cell.metadata.get("tags", ())
        if printed(cell) != printed(again)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_without_a_gpu_and_prints_what_is_stored(path: Path, tmp_path: Path) -> None:
    assert not stale(nbformat.read(path, as_version=4), execute(path, tmp_path)), "make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_with_its_output(path: Path) -> None:
    assert path.stat().st_size < 300_000
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stale_text_is_noticed_where_it_does_not_depend_on_the_machine(path: Path) -> None:
    stored, other = (nbformat.read(path, as_version=4) for _ in range(2))
    text = [cell for cell in other.cells if cell.cell_type == "code" and printed(cell)]
    for cell in text:
        cell.outputs = [nbformat.v4.new_output("stream", text="something else\n")]
    exempt = [cell.id for cell in text if MACHINE_DEPENDENT in cell.metadata.get("tags", ())]
    assert {line.partition(":")[0] for line in stale(stored, other)} == {cell.id for cell in text} - set(exempt)
    assert 1 <= len(exempt) <= len(text) // 4


def test_quickstart_shows_every_option() -> None:
    cells = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    for name in set(cuflash.__all__) - {"Explanation", "show_config"}:
        assert f"cuflash.{name}" in code, name
    for function in (cuflash.attention, cuflash.attention_varlen, cuflash.explain, cuflash.options):
        parameters = inspect.signature(function).parameters.values()
        for name in (p.name for p in parameters if p.kind is p.KEYWORD_ONLY):
            assert re.search(rf"\b{name}=|\"{name}\":", code), f"{function.__name__}: {name}"


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
