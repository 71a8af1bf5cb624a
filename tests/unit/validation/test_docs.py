"""Data docs: one page a result, nothing from outside."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tasks.validation.docs import build_site, without_outside
from tasks.validation.runner import validate_table
from tests.support.data.tables import WEEK, between, people, store_table, suite


def validated(store: ArtifactStore) -> None:
    """One result that passed and one that was refused."""
    table = store_table(store, people())
    validate_table(table, suite(), WEEK, store, "Nothing")
    with pytest.raises(DataContractError):
        validate_table(table, suite(between("age", 0, 30)), WEEK, store, "Nothing")


def test_every_result_gets_a_page_and_the_index_leads_to_it(
    store: ArtifactStore, tmp_path: Path
) -> None:
    validated(store)

    site = build_site(store, tmp_path / "home")

    assert site.num_pages == 2
    index = site.index.read_text()
    pages = re.findall(r"href='([0-9a-f]+\.html)'", index)
    assert len(pages) == 2
    assert index.index("refused") < index.index("passed")  # what is wrong comes first
    refused = (site.index.parent / pages[0]).read_text()
    assert "age has" in refused
    assert "people" in refused
    for page in site.index.parent.glob("*.html"):
        assert not re.search(r"https?://", page.read_text())
    shutil.rmtree(store.root / "failed_validations")
    assert build_site(store, tmp_path / "home").num_pages == 1
    assert len(list(site.index.parent.iterdir())) == 2


def test_a_result_that_a_later_release_kept_again_has_one_page(
    store: ArtifactStore, tmp_path: Path
) -> None:
    validated(store)
    first, *_ = (store.root / "validations").iterdir()
    shutil.copytree(first, first.with_name("of-a-later-release"))
    for _ in range(2):
        assert build_site(store, tmp_path / "home").num_pages == 2


def test_runs_that_end_at_one_time_do_not_take_each_others_site_away(
    store: ArtifactStore, tmp_path: Path
) -> None:
    validated(store)
    home = tmp_path / "home"
    build_site(store, home)
    with ThreadPoolExecutor(8) as runs:
        sites = list(runs.map(lambda _: build_site(store, home), range(20)))
    assert {site.num_pages for site in sites} == {2}
    assert len(list((home / "data_docs" / "current").iterdir())) == 3


def test_what_would_be_loaded_from_outside_is_taken_out() -> None:
    page = (
        "<link rel='x' href='https://a.example/b.css'><script src=\"https://c.example/d.js\">"
        "</script><img src='http://e.example/f.png'><a class='g' href='https://h.example'>i</a>"
        "<script>kept()</script><style>a{background: url('https://j.example/k.png') 0 0}</style>"
    )

    assert without_outside(page) == (
        "<a class='g' >i</a><script>kept()</script><style>a{background:  0 0}</style>"
    )
