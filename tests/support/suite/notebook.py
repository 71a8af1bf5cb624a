"""The notebook of the documentation: run as a reader would, and shown as a page.

python -m tests.support.suite.notebook      runs it, writes what it gave into it, and the page
"""

import os
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"
PAGE = NOTEBOOK.with_suffix(".md")
LIMIT_S = 900
MOST_LINES = 52
"""Of a log; a page shows its end."""


def execute(folder: Path) -> NotebookNode:
    """Run all cells in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook: NotebookNode = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    tools = Path(sys.executable).parent
    kept = {n: v for n, v in os.environ.items() if not n.startswith("FALAJ_")}
    changed = {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "NO_COLOR": "1"}
    client = NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": folder}})
    client.execute(env=changed, cwd=str(folder))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which would change with each run
        if cell.cell_type == "code":
            cell.outputs = [_relative(each, folder) for each in _joined(cell.outputs)]
    return notebook


def _joined(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Lines that were printed one after the other are one output; warnings are left out."""
    kept = [each for each in outputs if each.get("name") != "stderr"]
    for is_text, group in groupby(kept, lambda each: each.output_type == "stream"):
        first, *others = group
        if is_text:
            first.text = "".join(each.text for each in (first, *others))
            others = []
        yield from (first, *others)


def _relative(output: NotebookNode, folder: Path) -> NotebookNode:
    if output.output_type == "stream":
        output.text = output.text.replace(f"{folder}/", "")
    else:
        output.data = {k: v.replace(f"{folder}/", "") for k, v in output.data.items()}
    return output


def page(notebook: NotebookNode) -> str:
    """The notebook as Markdown, with its outputs."""
    parts = []
    for cell in notebook.cells:
        parts.append(_fenced(cell.source) if cell.cell_type == "code" else cell.source)
        parts.extend(_shown(output) for output in cell.get("outputs", ()))
    return "\n\n".join(parts) + "\n"


def _fenced(source: str) -> str:
    if source.startswith("!"):
        return f"```bash\n{re.sub('^!', '', source, flags=re.M)}\n```"
    return f"```python\n{source}\n```"


def _shown(output: NotebookNode) -> str:
    if output.output_type == "stream":
        lines = output.text.rstrip().splitlines()
        left = ["..."] * (len(lines) > MOST_LINES)
        return "\n".join(("```text", *left, *lines[-MOST_LINES:], "```"))
    if found := output.data.get("text/html"):
        return re.sub(r"<style.*?</style>|\n\s*", "", found, flags=re.S)
    return f"```text\n{output.data['text/plain']}\n```"


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        ran = execute(Path(place).resolve())
    nbformat.write(ran, NOTEBOOK)  # type: ignore[no-untyped-call]
    PAGE.write_text(page(ran), encoding="utf-8")
