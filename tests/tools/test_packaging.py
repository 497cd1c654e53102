"""What is shipped: sdist and wheel hold the CUDA sources and the types, and nothing of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="64")

ROOT = Path(__file__).resolve().parent.parent.parent
CUDA_SOURCES = {
    path.relative_to(ROOT).as_posix() for suffix in ("cu", "cuh") for path in (ROOT / "cuda_src").rglob(f"*.{suffix}")
}


def _run_python(code: str, *arguments: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code, *arguments]
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _build(source: Path, kind: str, target: Path) -> Path:
    """Call the build backend as pip and build do, but with the setuptools of this environment: no network."""
    target.mkdir()
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    _run_python(code, str(target), cwd=source)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging")
    hidden = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder / "checkout", ignore=hidden)
    return _build(folder / "checkout", "sdist", folder / "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    folder = sdist.parent.parent
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked")
    (source,) = (folder / "unpacked").iterdir()
    return _build(source, "wheel", folder / "wheel")


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path, wheel_files: set[str]) -> Message:
    (name,) = (name for name in wheel_files if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(name))


def test_wheel_holds_the_package_and_nothing_else(wheel_files: set[str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cuflash").rglob("*.py")}
    sources = {f"cuflash/{name}" for name in CUDA_SOURCES}
    shipped = {name for name in wheel_files if ".dist-info/" not in name}
    assert shipped == modules | sources | {"cuflash/py.typed", "cuflash/cuda_src/__init__.py"}
    assert "cuflash/cuda_src/forward_scalar.cu" in shipped and "cuflash/cuda_src/common/config.cuh" in shipped


def test_wheel_holds_the_license(wheel_files: set[str]) -> None:
    assert any(".dist-info/" in name and name.endswith("LICENSE") for name in wheel_files)


def test_sdist_holds_sources_and_documents_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    documents = {"LICENSE", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    documents |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert names >= CUDA_SOURCES | documents | {"setup.cfg", "pyproject.toml", "cuflash/py.typed"}
    assert not {name.partition("/")[0] for name in names} & {"tests", "benchmarks", "examples"}


def test_wheel_works_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import numpy, cuflash, cuflash.gpu.compile\n"
        "q = numpy.ones((3, 16), numpy.float32)\n"
        "assert (cuflash.attention(q, q, q) == 1).all()\n"
        "print(cuflash.__file__)\n"
        "print(cuflash.gpu.compile.source_folder())"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "CUDA_VISIBLE_DEVICES": ""}
    module, sources = map(Path, _run_python(code, cwd=tmp_path, env=environment).split())
    assert module == tmp_path / "site/cuflash/__init__.py"
    assert sources == tmp_path / "site/cuflash/cuda_src"


def test_requirements(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist") or []
    always = {line.partition(">")[0].replace("-", "_") for line in requirements if "extra ==" not in line}
    assert always == {"numpy", "ml_dtypes", "threadpoolctl"}
    extras = {name: [line for line in requirements if f'extra == "{name}"' in line] for name in ("cuda12", "cuda13")}
    assert [line.partition(">")[0] for line in extras["cuda12"]] == ["cupy-cuda12x[ctk]"]
    assert [line.partition(">")[0] for line in extras["cuda13"]] == ["cupy-cuda13x[ctk]"]
    # "cupy" itself would be built from source, with a toolkit that few have.
    assert not [line for line in requirements if line.startswith(("cupy>", "cupy;", "cupy ", "torch"))]


def test_metadata(metadata: Message) -> None:
    import cuflash

    assert metadata["Name"] == "cuflash"
    assert metadata["Version"] == cuflash.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra") or []) == {"cuda12", "cuda13", "examples", "test"}


def test_classifiers_are_those_of_the_official_list(metadata: Message) -> None:
    official = pytest.importorskip("trove_classifiers").classifiers
    ours = metadata.get_all("Classifier") or []
    assert not set(ours) - set(official) and ours == sorted(set(ours))


def test_classifiers_name_the_least_python_and_every_cuda_that_can_be_installed(metadata: Message) -> None:
    ours = metadata.get_all("Classifier") or []
    assert f"Programming Language :: Python :: {str(metadata['Requires-Python']).removeprefix('>=')}" in ours
    cuda = {line.rpartition(" :: ")[2] for line in ours if line.startswith("Environment :: GPU :: NVIDIA CUDA ::")}
    assert {f"cuda{version}" for version in cuda} == {
        extra for extra in metadata.get_all("Provides-Extra") or [] if extra.startswith("cuda")
    }


def test_changelog_names_this_version() -> None:
    import cuflash

    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## [")]
    assert versions[0] == "## [Unreleased]" and versions[1].startswith(f"## [{cuflash.__version__}] - ")


def test_pyproject_says_only_how_to_build() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert [line for line in lines if line.startswith("[")] == ["[build-system]"]
