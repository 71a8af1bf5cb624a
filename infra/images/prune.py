"""Leave in this environment what some requirements need, and write down what that is.

Set-up installs the whole lock, each file checked against its digests; an image needs no more than
a part of it. In the checkout: `.venv/bin/python -m infra.images.prune 'falaj[serve]'`.
"""

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.provision.checkout import Checkout

LIST = "packages.txt"


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
                pending += [one for one in asked if _applies(one, extra)]
    return {name for name, _ in seen}


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def prune(checkout: Checkout, wanted: Sequence[str]) -> None:
    """Uninstall the rest; the environment still counts as complete."""
    installed = dict[str, str]()
    for each in distributions():
        installed[canonicalize_name(each.name)] = each.version
    kept = closure(wanted)
    line = ["uv", "pip", "uninstall", "--quiet", "--python", sys.executable]
    subprocess.run([*line, *sorted(installed.keys() - kept)], check=True)
    listing = [f"{name}=={installed[name]}\n" for name in sorted(kept)]
    (checkout.venv / LIST).write_text("".join(listing), encoding="utf-8")
    checkout.mark_complete(checkout.wanted_digest())


if __name__ == "__main__":
    prune(Checkout(Path.cwd()), sys.argv[1:])
