"""The documentation as a site: `make docs` builds it in build/docs, and takes every warning for an error."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "cuflash"
author = copyright = "cuflash developers"
version = release = importlib.import_module("cuflash").__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
html_theme = "furo"
html_title = f"cuflash {version}"
exclude_patterns = ["_build"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # the docstrings have types in their own words
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

PAGES = {
    "README.md": "speed",
    "ARCHITECTURE.md": "architecture",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
}
"""Documents beside docs/, and the pages that include them, or what other pages refer to of them."""


def resolve_links_that_leave_docs(app: Sphinx, doctree: nodes.document) -> None:
    """Send links to documents beside docs/ to the pages that include them; other files are offered for download."""
    folder = Path(app.env.doc2path(app.env.docname)).parent
    for link in doctree.findall(addnodes.pending_xref):
        target = link["reftarget"]
        if link["reftype"] != "myst" or target in app.env.found_docs:
            continue
        # Links of included documents are relative to the root; those of pages are absolute here, without a suffix.
        path = next((path for path in (ROOT / target, ROOT / f"{target}.md") if path.is_file()), None)
        if path is None:
            continue
        page = PAGES.get(path.relative_to(ROOT).as_posix())
        if page:
            link["refdomain"], link["reftarget"], link["reftargetid"] = "doc", page, None
        else:
            download = addnodes.download_reference("", "", *link.children, reftarget=os.path.relpath(path, folder))
            link.replace_self(download)


def setup(app: Sphinx) -> None:
    """Register the above, before Sphinx collects what is to be downloaded."""
    app.connect("doctree-read", resolve_links_that_leave_docs, priority=100)
