"""Write the results table of README.md from the newest stored measurement: python benchmarks/readme.py [FILE.json]."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def table(results: dict[str, Any]) -> str:
    """Markdown: one line per problem, TFLOP/s of cuflash and of each peer that serves it, then host and import time."""
    rows = results["problems"]
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    lines = [
        f"`python benchmarks/forward.py` on one {results['device']}: TFLOP/s (4 B H N^2 D operations, half of them",
        "when causal), and the relative error against float64.",
        "",
        "| problem | " + " | ".join(names) + " | relative error |",
        "|---|" + "---:|" * (len(names) + 1),
    ]
    for row in rows:
        label = f"{row['dtype']}, D {row['head_dim']}, N {row['seqlen']}, {'causal' if row['causal'] else 'full'}"
        cells = [f"{row['tflops'][name]:.1f}" if name in row["tflops"] else "-" for name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + f" | {row['error']:.1e} |")
    host = ", ".join(f"{name} {value:.1f}" for name, value in results["host_us"].items())
    imports = ", ".join(f"{name} {value:.2f}" for name, value in results["import_s"].items())
    lines += ["", f"Host time in microseconds: {host}.", f"Import, seconds above CuPy's: {imports}."]
    return "\n".join(lines)


def main() -> int:
    """Replace what stands between the markers."""
    stored = sorted((ROOT / "benchmarks" / "results").glob("forward-*.json"))
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else stored[-1]
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{BEGIN}\n{table(json.loads(source.read_text()))}\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
