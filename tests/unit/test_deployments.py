from typing import Any

import pytest

from flows.config import read_pipeline_config
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT


def test_the_use_case_of_the_repository_is_valid() -> None:
    config = read_pipeline_config(PROJECT_ROOT / "feature_repo" / "flights")
    assert config.name == "flights"
    assert config.window.contains(config.splits.test)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("name: flights\nquestion", "nome: flights\nquestion", "nome: Extra inputs"),
        ("end: 2014-01-01T05:00:00Z}\nsplits", "end: 2012-01-01T05:00:00Z}\nsplits", "is reversed"),
        ("start: 2013-09-01T04:00:00Z", "start: 2013-08-01T04:00:00Z", "leaks into the past"),
        ("sql: sql/entities.sql", "sql: ../secrets.sql", "leaves the feature repository"),
    ],
)
def test_a_wrong_use_case_is_refused_with_the_place(
    tmp_path: Any, old: str, new: str, sentence: str
) -> None:
    text = (PROJECT_ROOT / "feature_repo" / "flights" / "use_case.yaml").read_text()
    assert old in text
    (tmp_path / "use_case.yaml").write_text(text.replace(old, new))
    with pytest.raises(ConfigurationError, match=sentence):
        read_pipeline_config(tmp_path)


def test_a_missing_use_case_says_how_to_name_one(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match="FALAJ_FEATURE_REPO"):
        read_pipeline_config(tmp_path)
