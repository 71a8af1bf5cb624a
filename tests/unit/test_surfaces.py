"""What users and other programs rely on changes only where somebody says so.

After a change that is meant: `python -m tests.support.suite.surfaces tests/surfaces`, and look at
what git shows of it.
"""

from pathlib import Path

import pytest

from tests.support.suite.surfaces import SURFACES, lines_of

RECORDED = Path(__file__).resolve().parents[1] / "surfaces"


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_is_as_recorded(name: str) -> None:
    assert lines_of(name) == (RECORDED / f"{name}.txt").read_text().splitlines()
