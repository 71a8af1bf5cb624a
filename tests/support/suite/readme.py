"""The parts of README.md that are made, not typed.

    python -m tests.support.suite.readme                commands and figures, from what is there
    python -m tests.support.suite.readme LOG REPORT     also the end of `make run`, and the picture

LOG is what `make run` printed, REPORT the `report.html` that it wrote; the picture needs Chromium.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from falaj.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "images" / "report.png"
WIDTH, HEIGHT = 1200, 900
FIRST, LAST, LONGEST = 3, 9, 96
FIGURES = (
    ("loop", "whole", "AUC of the test months"),
    ("loop", "whole", "second run, seconds"),
    ("features", "retrieval", "Feast's DuckDB store to the plug-in, CPU"),
    ("features", "materialization", "rows/s to SQLite, engine to Feast's own"),
    ("training", "strategies", "tabular: horovod to ddp, samples/s"),
    ("training", "elastic", "a killed rank costs, s"),
    ("conversion", "tabular", "tabular, batch 1024, CPU to onnx-fp32"),
    ("serving", "engine", "answers at 4 x capacity, 99 %, ms"),
    ("serving", "release", "alike versions rolled back at any look"),
    ("operation", "retraining", "drift result to retraining ordered, median s"),
)


def commands() -> Iterator[str]:
    """Every command with what it does."""
    yield from ("| `falaj` | what it does |", "|---|---|")
    for group in COMMANDS.values():
        for name, (_, what) in group.items():
            yield f"| `{name}` | {what.rstrip('.')} |"


def figures() -> Iterator[str]:
    """The headline figures, each with the bound it is held to, as `make bench` wrote them."""
    yield from ("| figure | value | bound |", "|---|--:|--:|")
    for part, measurement, name in FIGURES:
        results = json.loads((ROOT / "docs" / "benchmarks" / f"{part}.json").read_text())
        found = next(one for one in results[measurement]["measured"] if one["name"] == name)
        sign = "≥" if found["at_least"] else "≤"
        value, bound = f"{found['value']:.3g}", f"{sign} {found['bound']:g}"
        yield f"| [{name}](docs/benchmarks/{part}.md) | {value} | {bound} |"


def run(log: Path) -> Iterator[str]:
    """The first and the last lines that a run printed; long ones are cut."""
    text = log.read_text().replace(f"{ROOT}/", "")
    lines = [line for line in text.splitlines() if line[:2].isdigit() or line[:1].isupper()]
    shown = [*lines[:FIRST], "...", *lines[-LAST:]]
    yield "```"
    for line in shown:
        yield line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
    yield "```"


def replaced(text: str, block: str, lines: Iterator[str]) -> str:
    """The text with another content between `<!-- block -->` and `<!-- /block -->`.

    Raises:
        ValueError: it has not exactly one such block.
    """
    content = "\n".join(lines)
    pattern = rf"(<!-- {block} -->\n).*?(<!-- /{block} -->)"
    text, count = re.subn(pattern, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"README.md has {count} blocks `<!-- {block} -->`, expected one")
    return text


def current(text: str) -> str:
    """The README with the commands and figures of this commit."""
    return replaced(replaced(text, "commands", commands()), "figures", figures())


def take_picture(report: Path) -> None:
    """Screenshot of the report's first screen."""
    from tests.support.services.browser import browser

    with TemporaryDirectory() as scratch, browser(Path(scratch), WIDTH, HEIGHT) as page:
        page.open(report.resolve().as_uri())
        page.wait("document.readyState === 'complete'", "the report")
        page.picture(PICTURE)


if __name__ == "__main__":
    text = current(README.read_text())
    if len(sys.argv) > 1:
        text = replaced(text, "run", run(Path(sys.argv[1])))
        take_picture(Path(sys.argv[2]))
    README.write_text(text)
