"""Falaj keeps a machine-learning model good: pipelines, features, training, release, drift.

    import falaj

    project = falaj.open("shop")
    run = project.run()
    project.champion().predict(rows)

Names are imported when they are used, so `import falaj` takes no time. Only one of two packages of
a name can be imported, and which one depends on the order of Python's path; so another package with
the name of one of Falaj's is refused here, before any is imported.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from falaj.project import Model, Project, Run, open
    from tasks.kernel.errors import ConfigurationError, DataContractError, FalajError

__all__ = [
    "ConfigurationError",
    "DataContractError",
    "FalajError",
    "Model",
    "Project",
    "Run",
    "open",
]
NAMES = ("flows", "tasks", "serving", "infra")


def find_double(path: list[str]) -> tuple[str, str, str] | None:
    """The first name that stands twice on a path of imports, and both places."""
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    for name in NAMES:
        own = os.path.join(home, name, "__init__.py")
        for folder in path:
            for other in (os.path.join(name, "__init__.py"), f"{name}.py"):
                found = os.path.realpath(os.path.join(folder, other))
                if found != own and os.path.isfile(found):
                    return name, own, found
    return None


def refuse_doubles() -> None:
    """End a command, or fail an import, where a name stands twice."""
    if double := find_double(sys.path):
        name, own, other = double
        message = (
            f"two packages are named {name!r}: Falaj's {own}, and {other}; only one of them can "
            "be imported. Rename the other, or work in a folder and environment where it is not "
            "on Python's path. Nothing was started"
        )
        if sys.argv[:1] == ["-m"] or os.path.basename(sys.argv[0]) == "falaj":
            sys.stderr.write(f"refused: {message}\n")
            raise SystemExit(2)
        raise ImportError(message)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'falaj' has no attribute {name!r}")
    home = "tasks.kernel.errors" if name.endswith("Error") else "falaj.project"
    return getattr(import_module(home), name)


refuse_doubles()
