"""Imports inside of the package go one way: settings, problem, plan, then gpu and cpu, then what users call."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cuflash

PACKAGE = Path(cuflash.__file__).parent
FLOORS = (("settings", "cupy_cache"), ("log",), ("problem",), ("plan",), ("gpu", "cpu"), ("",))
"""Files and folders, the lowest first; the last floor is everything else at the top level."""
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in PACKAGE.rglob("*.py")
    if "cuda_src" not in path.parts
}


def floor_of(module: str) -> tuple[int, str]:
    """Height of a module, and the room that it is in."""
    room = module.split(".")[0]
    found = [height for height, rooms in enumerate(FLOORS) if room in rooms]
    return (found[0], room) if found else (len(FLOORS) - 1, "")


def imported_by(module: str) -> set[str]:
    """Modules of the package that a module imports, at any place in it."""
    path = MODULES[module]
    here = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [part for part in here[: len(here) - node.level + 1] if part]
            target = ".".join(base + (node.module.split(".") if node.module else []))
            for alias in node.names:
                inner = f"{target}.{alias.name}".lstrip(".")
                found.add(inner if inner in MODULES else target)
    return found


@pytest.mark.parametrize("module", sorted(MODULES), ids=lambda module: module or "cuflash")
def test_imports_go_down(module: str) -> None:
    height, room = floor_of(module)
    for other in imported_by(module):
        other_height, other_room = floor_of(other)
        assert other_room == room or other_height < height, f"{module} imports {other}"


def test_no_circles() -> None:
    imports = {module: imported_by(module) - {""} for module in MODULES if module}
    while imports:
        free = [module for module, others in imports.items() if not others & imports.keys()]
        assert free, f"circles among {', '.join(sorted(imports))}"
        for module in free:
            del imports[module]


def test_few_import_cupy() -> None:
    """The folder that runs on GPUs, and what finds out what is installed."""
    for module, path in MODULES.items():
        if module.split(".")[0] not in ("gpu", "cupy_cache", "doctor"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not any(name.split(".")[0] in ("cupy", "cupyx") for name in names), module
