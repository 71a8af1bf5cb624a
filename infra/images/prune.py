"""Leave in this environment what some requirements need, and write down what that is.

Set-up installs the whole lock, each file checked against its digests; an image needs no more than
a part of it. In the checkout: `.venv/bin/python -m infra.images.prune 'falaj[serve]'`.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import Distribution, distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.provision.checkout import Checkout


def closure(wanted: Sequence[str]) -> set[str]:
    """Names of the installed packages that requirements ask for, and what those ask for.

    Raises:
        PackageNotFoundError: one of them is not installed.
    """
    seen = set[tuple[str, str]]()
    pending = [Requirement(text) for text in wanted]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                asked = map(Requirement, distribution(name).requires or ())
                pending += [r for r in asked if not r.marker or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def prune(checkout: Checkout, wanted: Sequence[str]) -> None:
    """Remove the rest; the environment still counts as complete.

    A file that a package shares with one that is kept stays: `mlflow` holds all of `mlflow-skinny`,
    and an installer that removes the one breaks the other.
    """
    installed = {str(canonicalize_name(each.name)): each for each in distributions()}
    kept = closure(wanted)
    needed = {path for name in kept for path in _files(installed[name])}
    for name in installed.keys() - kept:
        for path in _files(installed[name]) - needed:
            compiled = Path(cache_from_source(path))
            for each in (compiled, path):
                each.unlink(missing_ok=True)
                with suppress(OSError):  # not empty, or gone
                    os.removedirs(each.parent)
    listing = [f"{name}=={installed[name].version}\n" for name in sorted(kept)]
    (checkout.venv / "packages.txt").write_text("".join(listing), encoding="utf-8")
    checkout.mark_complete(checkout.wanted_digest())


def _files(package: Distribution) -> set[Path]:
    return {Path(os.path.normpath(file.locate())) for file in package.files or ()}


if __name__ == "__main__":
    prune(Checkout(Path.cwd()), sys.argv[1:])
