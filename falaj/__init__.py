"""Falaj keeps a machine-learning model good: pipelines, features, training, release, drift.

    import falaj

    project = falaj.open("shop")
    run = project.run()
    project.champion().predict(rows)

Names are imported when they are used, so `import falaj` takes no time.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from falaj.doubles import refuse_doubles

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'falaj' has no attribute {name!r}")
    home = "tasks.kernel.errors" if name.endswith("Error") else "falaj.project"
    return getattr(import_module(home), name)


refuse_doubles()
