"""Pages of the documentation, followed by somebody who types what stands there."""

from pathlib import Path

import pytest

from tests.support.suite import notebook
from tests.support.suite.blocks import ROOT, RUN, blocks, run

PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page != notebook.PAGE
    and any(block.language in RUN and not block.reason for block in blocks(page))
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_can_be_run(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_notebook_can_be_run(tmp_path: Path) -> None:
    notebook.execute(tmp_path)
