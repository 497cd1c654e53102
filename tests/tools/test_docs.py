"""Documents: the site builds without a warning, links lead somewhere, and what examples print is what they say."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import isclass, isfunction
from pathlib import Path
from types import ModuleType

import pytest

import cuflash
import cuflash.dask
import cuflash.distributed
import cuflash.reference
import cuflash.testing
from cuflash.plan.gated import GATED_KERNELS
from cuflash.plan.table import KERNELS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(#[^)\s]*)?\)")
EXAMPLES = [path for path in DOCUMENTS if ">>> " in path.read_text()]


def test_every_kernel_has_its_page() -> None:
    pages = ROOT / "docs" / "kernels"
    listed = (pages / "index.md").read_text().split()
    missing = [spec.name for spec in KERNELS if spec.name not in listed]
    assert missing == [], "CONTRIBUTING.md, Add a kernel: give it a page, and name that in docs/kernels/index.md"
    gated = (pages / "gated.md").read_text()
    assert [spec.name for spec in GATED_KERNELS if spec.name not in gated] == []


def anchors(path: Path) -> set[str]:
    """What headings of a document are called in links."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path) -> list[str]:
    """Links of a document to files, or headings of Markdown files, that are not there."""
    broken = []
    for name, anchor in LINK.findall(path.read_text()):
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(name + anchor)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken_links(path)


def test_broken_links_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# One heading\n[a](page.md#one-heading) [b](#one-heading) [c](none.md) [d](page.md#another)\n")
    assert broken_links(path) == ["none.md", "page.md#another"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_print_what_they_say(path: Path) -> None:
    text = re.sub(r"^```.*$", "", path.read_text(), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    assert test.examples
    assert not doctest.DocTestRunner().run(test).failed


@pytest.mark.parametrize(
    "module",
    [cuflash, cuflash.reference, cuflash.testing, cuflash.distributed, cuflash.dask],
    ids=lambda module: module.__name__,
)
def test_docstrings_print_what_they_say(module: ModuleType) -> None:
    for name, value in list(vars(module).items()):  # examples may import more
        if not str(getattr(value, "__module__", "")).startswith("cuflash"):
            continue
        for test in doctest.DocTestFinder().find(value, name, module=False, globs={}):
            assert not doctest.DocTestRunner().run(test).failed, test.name


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the site, built without a warning."""
    for name in ("sphinx", "numpydoc", "myst_parser", "furo"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'cuflash[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_site_has_every_page(site: Path) -> None:
    for page in (ROOT / "docs").glob("**/*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).is_file()


def test_site_describes_everything_public_and_nothing_else(site: Path) -> None:
    public = {f"cuflash.{name}": getattr(cuflash, name) for name in cuflash.__all__ if name != "reference"}
    public |= {f"cuflash.testing.{name}": getattr(cuflash.testing, name) for name in cuflash.testing.__all__}
    public |= {f"cuflash.distributed.{name}": getattr(cuflash.distributed, name) for name in dir(cuflash.distributed)}
    public["cuflash.dask.attention"] = cuflash.dask.attention
    for name, value in vars(cuflash.reference).items():
        if isfunction(value) and value.__module__.startswith("cuflash.") and not name.startswith("_"):
            public[f"cuflash.reference.{name}"] = value
    page = (site / "api.html").read_text()
    described = set(re.findall(r'id="(cuflash[\w.]*)"', page))
    members = {name for name in described if isclass(public.get(name.rpartition(".")[0]))}
    assert described - members == set(public)
    assert all(f"<strong>{field.name}</strong>" in page for field in fields(cuflash.Explanation))
    expected = set()
    for owner in ("cuflash.KVCache", "cuflash.testing.Case", "cuflash.testing.Outcome"):
        expected |= {f"{owner}.{name}" for name in vars(public[owner]) if not name.startswith("_")}
    assert expected <= members


def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    """Those that leave docs/ lead to the pages that include the documents, or to copies of files."""
    assert 'href="architecture.html"' in (site / "decisions.html").read_text()
    assert 'href="speed.html"' in (site / "performance.html").read_text()
    assert 'href="../decisions.html"' in (site / "kernels/merge.html").read_text()
    assert {"memory.ipynb", "decoding.ipynb"} <= {path.name for path in (site / "_downloads").rglob("*.ipynb")}
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^":#?]+)[#?"]', page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(site)}: {link}"
