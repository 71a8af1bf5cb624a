"""The licences of all packages that Falaj requires, with the extras of a loop and a server."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution

from infra.images.prune import closure
from tasks.governance.bill import licence_of
from tasks.kernel.settings import PROJECT_ROOT

EXTRAS = ("train", "convert", "serve")
FORBIDDEN = re.compile(r"\bA?GPL|Affero|SSPL|BUSL|Commons Clause|proprietary", re.IGNORECASE)


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
