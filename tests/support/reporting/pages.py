"""A report's page as a tree of tags and words, and its pictures as trees of their own."""

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from markupsafe import Markup

from tasks.contracts.run import RunRecord
from tasks.kernel.settings import ArtifactStore
from tasks.reporting.page import render_page, stored_artifacts
from tasks.reporting.pictures import draw

DATA_DOCS = "../../data_docs/current/index.html"
"""The one link that leaves the page: to the pages beside it in the state folder."""
VOID = {"meta", "link", "br", "img", "input", "hr"}
SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where tags do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.words += data


def rendered(record: RunRecord, store: ArtifactStore) -> tuple[str, Page]:
    text = render_page(record, stored_artifacts(record, store), DATA_DOCS, draw(record))
    return text, Page(text)


def parsed(drawing: Markup | None) -> ElementTree.Element:
    """The picture as a tree; fails where it is not well-formed or holds a number that is none."""
    root = ElementTree.fromstring(str(drawing))
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not re.search(r"\b(nan|inf)\b", value), (element.tag, name, value)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    return root


def run_command(command: str, folder: Path) -> str:
    """What a command of a page prints in the state folder."""
    program, *words = shlex.split(command)
    command_line = [sys.executable if program == "python" else program, *words]
    return subprocess.run(
        command_line, cwd=folder, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def texts(root: ElementTree.Element) -> list[str]:
    """All words drawn in the picture."""
    return [t.text or "" for t in root.iter(f"{SVG}text")]


def tipped(root: ElementTree.Element) -> list[ElementTree.Element]:
    """Drawn things that say more when the pointer rests on them."""
    return [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]


def tips(root: ElementTree.Element) -> list[str]:
    """What they say."""
    return [group.findtext(f"{SVG}title") or "" for group in tipped(root)]


def place(group: ElementTree.Element) -> tuple[float, float]:
    """Where a dot is drawn."""
    dot = next(group.iter(f"{SVG}use"))
    return float(dot.get("x", "")), float(dot.get("y", ""))
