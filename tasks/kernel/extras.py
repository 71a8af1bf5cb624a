"""Which of Falaj's extras are installed: the parts of it that only some uses need."""

import importlib.util
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

from packaging.requirements import Requirement

from tasks.kernel.errors import ConfigurationError

PROJECT = "falaj"


def require_extras(*extras: str) -> None:
    """See that all packages of some extras are here.

    Raises:
        ConfigurationError: one is missing; the sentence has the line that installs it.
    """
    for extra in extras:
        if missing := sorted(name for name in _packages_of(extra) if not is_installed(name)):
            raise ConfigurationError(
                f"{', '.join(missing)}: not installed, and this command needs the extra {extra!r}; "
                f"run: pip install '{PROJECT}[{','.join(extras)}]'. Nothing was started"
            )


def require_horovod() -> None:
    """See that Horovod is here; that it fits PyTorch was seen when it was installed.

    Raises:
        ConfigurationError: it is not.
    """
    if not has_horovod():
        raise ConfigurationError(
            "Horovod, by which the ranks of a training work together, is not in this environment; "
            f"no registry has it, so it is built here: run `{PROJECT} setup` (2 to 3 minutes; "
            "needs a C++ compiler). Nothing was trained"
        )


def has_horovod() -> bool:
    """Whether Horovod is installed."""
    return importlib.util.find_spec("horovod") is not None


def _packages_of(extra: str) -> Iterator[str]:
    try:
        lines = requires(PROJECT) or ()
    except PackageNotFoundError:  # a checkout on the path, which is not installed
        return
    for wanted in map(Requirement, lines):
        if wanted.marker and wanted.marker.evaluate({"extra": extra}):
            yield wanted.name


def is_installed(name: str) -> bool:
    """Whether a distribution is installed."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
