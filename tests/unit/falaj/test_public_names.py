"""What `import falaj` offers."""

from pathlib import Path

import pytest

import falaj


@pytest.mark.parametrize("name", falaj.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(falaj, name).__doc__


def test_a_folder_that_is_no_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(falaj.ConfigurationError, match="falaj init"):
        falaj.open(tmp_path)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        falaj.train  # noqa: B018
