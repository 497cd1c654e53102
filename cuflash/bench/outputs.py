"""Files that commands write: tried before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_file(path: Path) -> None:
    """Raise OSError if a file cannot be written there, without leaving one."""
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def check_picture(path: Path) -> None:
    """Raise OSError or ValueError if a picture cannot be saved there, without leaving a file."""
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ValueError(f"no picture has the suffix {path.suffix!r}, expected one of {', '.join(sorted(formats))}")
    check_file(path)


def save_picture(figure: Figure, path: Path, dpi: int) -> None:
    """Save it under this very name, to which matplotlib adds a suffix if there is none; then it is a PNG."""
    figure.savefig(path, format=path.suffix[1:] or "png", dpi=dpi)
