"""The JSON schema of a use case is that of the code, and what the project ships keeps to it.

After a change that is meant: `python -m tests.support.suite.schema > flows/use-case.schema.json`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from flows.config import read_pipeline_config, suites_of
from tasks.kernel.settings import PROJECT_ROOT
from tests.support.data.declared import USE_CASE
from tests.support.suite.schema import use_case_schema

WRITTEN = PROJECT_ROOT / "flows" / "use-case.schema.json"
USE_CASES = [
    *sorted((PROJECT_ROOT / "feature_repo").glob("*/use_case.yaml")),
    *sorted((PROJECT_ROOT / "tests" / "support" / "data").glob("*/use_case.yaml")),
]


def faults(use_case: dict[str, Any]) -> list[str]:
    plain = json.loads(json.dumps(use_case, default=str))
    return [error.json_path for error in Draft202012Validator(use_case_schema()).iter_errors(plain)]


def test_the_written_schema_is_that_of_the_code() -> None:
    assert json.loads(WRITTEN.read_text()) == use_case_schema()


@pytest.mark.parametrize("file", USE_CASES, ids=lambda file: file.parent.name)
def test_each_use_case_of_the_project_keeps_to_it(file: Path) -> None:
    assert faults(yaml.safe_load(file.read_text())) == []


def test_the_example_of_the_docs_is_a_whole_use_case(tmp_path: Path) -> None:
    page = (PROJECT_ROOT / "docs" / "explanation" / "use-cases.md").read_text()
    text = page.partition("```yaml\n")[2].partition("```")[0]
    assert faults(yaml.safe_load(text)) == []
    (tmp_path / "use_case.yaml").write_text(text)
    config = read_pipeline_config(tmp_path)
    assert set(suites_of(config, tmp_path).tables) == {"habits", "customers"}
    assert config.features.training_set.numeric == ("amount",)


def test_an_editor_marks_what_is_wrong_and_takes_the_short_forms() -> None:
    assert faults(USE_CASE) == []
    assert faults({**USE_CASE, "splits": {"start": "2024-01-01"}}) == ["$.splits"]
    wrong = json.loads(json.dumps(USE_CASE))
    wrong["features"]["training_set"]["label_known_after"] = "soon"
    wrong["features"]["feature_tables"][0]["aggregate"] = []
    assert sorted(faults(wrong)) == [
        "$.features.feature_tables[0]",
        "$.features.training_set.label_known_after",
    ]
