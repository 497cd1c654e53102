"""What stands around the package: how to cite it, and the forms in which issues come."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import cuflash

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parent.parent.parent
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_citation_names_this_version_and_its_date() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## \[(\d.*?)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released is not None
    assert (citation["version"], str(citation["date-released"])) == released.groups()
    assert citation["version"] == cuflash.__version__ and citation["authors"] == [{"name": "cuflash developers"}]


@pytest.mark.skipif(not FORMS, reason="an sdist has no forms")
def test_forms_are_whole_and_ask_for_what_doctor_prints() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature"]
    for path in FORMS:
        form: dict[str, Any] = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"]
        fields = {field["id"]: field for field in form["body"]}
        assert len(fields) == len(form["body"])
        assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in fields.values())
        assert "python -m cuflash doctor" in fields["doctor"]["attributes"]["label"]
        assert fields["doctor"]["validations"] == {"required": True}


@pytest.mark.skipif(not FORMS, reason="an sdist has no forms")
def test_program_of_the_bug_form_runs(capsys: pytest.CaptureFixture[str]) -> None:
    fields = {field["id"]: field for field in yaml.safe_load(FORMS[0].read_text())["body"]}
    program = fields["program"]["attributes"]["value"]
    exec(program, {})
    assert float(capsys.readouterr().out) < 1e-5
