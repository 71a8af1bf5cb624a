"""Pages of the documentation: they build strictly, and their blocks are what they say."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from cyclopts import CycloptsError

from falaj.__main__ import app
from tests.support.suite import notebook, reference
from tests.support.suite.blocks import ROOT, Block, blocks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks(page)]
CHECKED = [block for block in BLOCKS if block.language in ("yaml", "json", "python")]
SHELL = [block for block in BLOCKS if block.language in ("bash", "console")]


def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    line = [sys.executable, "-m", "zensical", "build", "--strict"]
    ended = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / ".site" / "index.html").exists()


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_of_this_commit(name: str) -> None:
    assert (reference.FOLDER / f"{name}.md").read_text(encoding="utf-8") == reference.page(name)


@pytest.mark.parametrize("block", CHECKED, ids=str)
def test_a_block_is_of_its_language(block: Block) -> None:
    if block.language == "yaml":
        list(yaml.safe_load_all(block.text))
    elif block.language == "json":
        json.loads(block.text)
    else:
        compile(block.text, str(block), "exec")


LISTED = re.compile(r"^    (falaj .+(?:\\\n.+)*)", re.M)
"""A command in an indented listing."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_that_a_page_shows_is_one(page: Path) -> None:
    shown = LISTED.findall(page.read_text(encoding="utf-8"))
    shown += [line for block in SHELL if block.page == page for line in block.commands()]
    for line in shown:
        command = re.split(r" # | [|>&] ?|\n", line.replace("\\\n", " "))[0]
        if command.startswith("falaj ") and not {"--help", "$"} & {*command, *command.split()}:
            words = shlex.split(command)
            _, common, *_ = app.meta.parse_args(words[1:], exit_on_error=False, print_error=False)
            app.parse_args(common.args, exit_on_error=False, print_error=False)


def test_a_command_that_is_none_is_found() -> None:
    with pytest.raises(CycloptsError):
        app.parse_args(["run", "--nosuch"], exit_on_error=False, print_error=False)


def test_every_variable_that_the_code_reads_is_described() -> None:
    read: set[str] = set()
    for folder in ("falaj", "flows", "tasks", "serving", "infra", "feature_repo"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".yml") and True:
                read |= set(re.findall(r"\bFALAJ_[A-Z][A-Z_]+[A-Z]\b", file.read_text()))
    assert read == set(reference.VARIABLES)


def test_the_notebook_was_run_whole_and_its_page_shows_that() -> None:
    ran = nbformat.read(notebook.NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in ran.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert notebook.PAGE.read_text(encoding="utf-8") == notebook.page(ran)


def test_every_row_of_the_threat_model_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "explanation" / "threat-model.md").read_text(encoding="utf-8")
    rows = [line for line in text.partition("## STRIDE")[2].splitlines() if line.startswith("| ")]
    held = [row.rpartition(" | ")[2] for row in rows if " held by |" not in row]
    assert len(held) > 45
    for cell in held:
        tests = re.findall(r"`([\w/]+\.py)::(test_\w+)`", cell)
        assert tests or cell.startswith(("open", "accepted by ")), cell
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
