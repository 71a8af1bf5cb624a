"""Code blocks of the documentation, and a program that runs those of a page one after the other.

A block is run unless a line `<!-- not run: why -->` stands above it. Languages that are run: `bash`
and `python`. `console` shows commands with their output; its commands are only parsed.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+) -->\s*\Z")
RUN = ("bash", "python")
LIMIT_S = 900


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    reason: str = ""
    """Why it is not run; empty where it is."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[str]:
        """Command lines of a `bash` or `console` block, continued lines joined."""
        text = self.text.replace("\\\n", " ")
        for line in text.splitlines():
            if self.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line.removeprefix("$ ")
            yield line.split("  #")[0].strip()


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        skipped = NOT_RUN.search(before)
        body = re.sub(rf"^{match['indent']}", "", match["text"], flags=re.M)
        reason = skipped["reason"] if skipped else ""
        found.append(Block(page, before.count("\n") + 1, match["language"], body, reason))
    return found


def run(page: Path, folder: Path) -> None:
    """Run a page's blocks in an empty folder; a block finds what the ones before it have left.

    Raises:
        AssertionError: a block ended with another code than 0.
    """
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "NO_COLOR": "1"}
    for name in ("FALAJ_HOME", "FALAJ_FEATURE_REPO"):
        environment.pop(name, None)
    for block in blocks(page):
        if block.language not in RUN or block.reason:
            continue
        program = ["bash", "-euo", "pipefail"] if block.language == "bash" else [sys.executable]
        ended = subprocess.run(
            [*program, "/dev/stdin"],
            input=block.text,
            cwd=folder,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
        assert ended.returncode == 0, f"{block} ended with {ended.returncode}:\n{ended.stdout}"
