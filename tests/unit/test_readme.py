"""README and docs: what is made is current, links lead to files, and the first page is short."""

import re
from pathlib import Path

import pytest

from tests.support.suite.readme import README, ROOT, current, replaced

PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_readme_has_the_commands_and_figures_of_this_commit() -> None:
    text = README.read_text()
    assert current(text) == text


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len(README.read_text().splitlines()) <= 250


def test_a_block_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        replaced("no blocks", "run", iter(()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
