"""What is shipped: the wheel holds the package and works without a checkout, the sdist is as good as one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
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

USE = r"""
import ml_dtypes, numpy, pathlib
import cuflash, cuflash.gpu.compile

rng = numpy.random.default_rng(0)
for dtype, bound in ((numpy.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2), (numpy.float32, 1e-5), (numpy.float64, 1e-14)):
    q, k, v = (rng.standard_normal((2, 4, 65, 32)).astype(dtype) for _ in range(3))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    exact, _ = cuflash.reference.attention(q, k, v, causal=True)
    assert out.dtype == dtype and abs(out.astype(float) - exact).max() < bound, dtype
sources = cuflash.gpu.compile.source_folder()
assert sources == pathlib.Path(cuflash.__file__).parent / "cuda_src"
print(sources, *sorted(path.relative_to(sources).as_posix() for path in sources.rglob("*.cu*")), sep="\n")
"""


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


def _environment(**variables: str) -> dict[str, str]:
    """This process's, without this checkout; nor is a GPU looked for at import, which CuPy may be missing for."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "CUFLASH_COMPILE": "lazy"} | variables


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packaging")
    hidden = shutil.ignore_patterns(".[!c]*", ".ci", "__pycache__", "*.egg-info", "build", "dist", "digits.png")
    shutil.copytree(ROOT, folder / "checkout", ignore=hidden)
    return _build(folder / "checkout", "sdist", folder / "sdist")


@pytest.fixture(scope="module")
def unpacked(sdist: Path) -> Path:
    folder = sdist.parent.parent / "unpacked"
    with tarfile.open(sdist) as archive:
        # Python 3.14 filters by itself; before, some warn of calls that do not say how.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    return _build(unpacked, "wheel", unpacked.parent.parent / "wheel")


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


def test_sdist_is_the_checkout(sdist: Path) -> None:
    checkout = sdist.parent.parent / "checkout"
    files = {path.relative_to(checkout).as_posix() for path in checkout.rglob("*") if path.is_file()}
    with tarfile.open(sdist) as archive:
        shipped = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    left = {name for name in files - shipped if ".egg-info/" not in name}
    assert not left and shipped >= CUDA_SOURCES | {"CHANGELOG.md", "Makefile", "tests/conftest.py", "docs/gated.md"}
    assert not [name for name in shipped if name.endswith((".pyc", ".so")) or "/." in name]


def test_sdist_tests_itself(unpacked: Path) -> None:
    """Some of the tests, of all that they read beside the package: documents, results, sources, the case matrix."""
    modules = ("problem/test_kind.py", "tools/test_layers.py", "tools/test_readme.py")
    tests = [f"tests/{module}" for module in modules]
    code = (
        "import sys, cuflash, pytest\n"
        "print(cuflash.__file__)\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    printed = _run_python(code, *tests, cwd=unpacked, env=_environment(PYTHONPATH=str(unpacked)))
    assert printed.startswith(str(unpacked / "cuflash")) and " passed" in printed


def test_unpacked_wheel_works_where_there_is_no_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    folder, *sources = _run_python(USE, cwd=tmp_path, env=_environment(PYTHONPATH=str(tmp_path / "site"))).splitlines()
    assert Path(folder) == tmp_path / "site/cuflash/cuda_src"
    assert {f"cuda_src/{name}" for name in sources} == CUDA_SOURCES


# Installed, with what it requires, where there is nothing else


def _pip(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "-q"]
    return subprocess.run([*command, *arguments], env=_environment(), capture_output=True, text=True)


def _always_required(metadata: Message) -> list[str]:
    return [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]


OLDEST = pytest.param(
    "oldest",
    marks=pytest.mark.skipif(sys.version_info >= (3, 13), reason="the least NumPy has no wheels for Python 3.13"),
)


@pytest.fixture(scope="module", params=["newest", OLDEST])
def installed(
    request: pytest.FixtureRequest, wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The Python of an environment that holds the wheel and the newest, or the oldest, of what it requires alone."""
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    required = _always_required(metadata)
    if request.param == "oldest":
        required = [line.replace(">=", "==") for line in required]
    done = _pip(python, "--only-binary=:all:", *required)
    if done.returncode and "CI" not in os.environ:
        pytest.skip(f"pip cannot install what cuflash requires, for lack of a network perhaps: {done.stderr}")
    assert done.returncode == 0, done.stderr
    done = _pip(python, "--no-index", str(wheel))
    assert done.returncode == 0, done.stderr
    return python


def test_installed_wheel_is_used_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = subprocess.run([installed, *arguments], cwd=tmp_path, env=_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    folder, *sources = run("-W", "error", "-c", USE).splitlines()
    assert Path(folder).is_relative_to(installed.parent.parent)
    assert {f"cuda_src/{name}" for name in sources} == CUDA_SOURCES
    doctor = run("-m", "cuflash", "doctor")
    assert "check: NumPy attention bfloat16" in doctor and "verdict: ready" in doctor
    assert "forward_wgmma" in run("-m", "cuflash", "explain", "attention", "--q", "4,16,4096,128", "--device", "90")


def test_demo_without_its_libraries_names_them(installed: Path, tmp_path: Path) -> None:
    command = [installed, "-m", "cuflash", "demo"]
    done = subprocess.run(command, cwd=tmp_path, env=_environment(), capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "The demo needs matplotlib: pip install matplotlib scikit-learn\n"


def test_requirements(metadata: Message) -> None:
    requirements = metadata.get_all("Requires-Dist") or []
    always = {re.split("[!<>=]", line)[0].replace("-", "_") for line in _always_required(metadata)}
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
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "cuda12", "cuda13", "distributed", "docs", "examples", "test",
    }  # fmt: skip


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
