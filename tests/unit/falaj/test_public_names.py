"""What `import falaj` offers."""

from pathlib import Path

import pytest

import falaj
from tests.support.host.processes import run_python

HEAVY = ("pandas", "torch", "prefect", "feast", "duckdb", "sqlalchemy", "numpy", "pydantic")


def test_importing_falaj_imports_nothing_heavy() -> None:
    program = f"import falaj, sys; print([name for name in {HEAVY} if name in sys.modules])"
    assert run_python("-c", program, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", falaj.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(falaj, name).__doc__


def test_a_folder_that_is_no_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(falaj.ConfigurationError, match="falaj init"):
        falaj.open(tmp_path)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        falaj.train  # noqa: B018
