"""The licences of all packages that Falaj requires, with the extras of a loop and a server.

    python -m infra.licences            write docs/reference/licences.md
    python -m infra.licences --check    compare, and look for what may not be required

Exit codes: 0 well; 1 the page is old, or a licence is unknown or not allowed.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution

from infra.images.prune import closure
from tasks.governance.bill import licence_of
from tasks.kernel.settings import PROJECT_ROOT

EXTRAS = ("train", "convert", "serve")
PAGE = PROJECT_ROOT / "docs" / "reference" / "licences.md"
FORBIDDEN = re.compile(r"\bA?GPL|Affero|SSPL|BUSL|Commons Clause|proprietary", re.IGNORECASE)
HEAD = """# Licences

{number} packages are required by Falaj with its extras `train`, `convert` and `serve`, {base} of
them without any extra. Written by `python -m infra.licences` from what is installed.

| package | version | licence |
|---|---|---|
"""


def required(own: Sequence[str] = EXTRAS) -> list[Distribution]:
    """All packages that the project requires with some of its extras, by name.

    Those of other packages count only where one names them.
    """
    project = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    optional = project["project"]["optional-dependencies"]
    lists = [project["project"]["dependencies"], *(optional[extra] for extra in own)]
    asked = [line for lines in lists for line in lines if line[:6] != "falaj["]
    return [distribution(name) for name in sorted(closure(asked))]


def faults(packages: Sequence[Distribution]) -> Iterator[str]:
    """One sentence for each licence that is unknown or not allowed."""
    for package in packages:
        licence = licence_of(package.metadata)
        if not licence:
            yield f"{package.name}: its metadata name no licence; read its wheel, add it to CHOSEN"
        elif FORBIDDEN.search(licence):
            yield f"{package.name}: {licence} may not be required; make it an extra or replace it"


def page(packages: Sequence[Distribution]) -> str:
    """The Markdown page."""
    rows = [
        f"| {p.name} | {p.version.partition('+')[0]} | {licence_of(p.metadata)} |\n"
        for p in packages
    ]
    return HEAD.format(number=len(packages), base=len(required(()))) + "".join(rows)


def main(arguments: Sequence[str]) -> int:
    """Write the page, or check it."""
    packages = required()
    wrong = list(faults(packages))
    text = page(packages)
    if "--check" not in arguments:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        wrong.append(f"{PAGE.name} is old; run python -m infra.licences")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
