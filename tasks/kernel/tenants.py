"""Tenants of an installation: teams that share its machine and issuer, with a state folder each.

    <installation>/tenants.yaml       who they are, and how much of the machine each may hold
    <installation>/tenants/<name>/    the state folder of one: registry, stores, models, pools, keys

What is in a tenant's folder, or at the addresses of its `server.yaml`, is no other tenant's.
"""

import re
from pathlib import Path

import yaml
from pydantic import ConfigDict, NonNegativeInt, PositiveInt

from tasks.kernel import files
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.values import Contract, checked

TENANT = "FALAJ_TENANT"
"""Variable with the tenant whose state is worked on; without it, the installation's own."""
FOLDER, FILE = "tenants", "tenants.yaml"
NAME = r"[a-z][a-z0-9-]{0,39}"
INSTALLATION = "installation"
"""Name of an installation's own state among those of its tenants; no tenant has it."""


class Tenant(Contract):
    """A team of an installation; `tenants.yaml` has one by name."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    contact: str = ""
    """Who answers for its data and models."""
    cores: PositiveInt | None = None
    """CPU cores that its leases hold at a time, at most; None: all that are free."""
    gpus: NonNegativeInt | None = None
    """GPUs and slices of GPUs, likewise."""


def tenant_of(home: Path) -> str:
    """The tenant whose state folder this is; empty for an installation's own."""
    return home.name if home.parent.name == FOLDER and (home.parents[1] / FILE).exists() else ""


def name_of(home: Path) -> str:
    """The tenant whose state folder this is; `installation` for an installation's own."""
    return tenant_of(home) or INSTALLATION


def installation_of(home: Path) -> Path:
    """The state folder of the installation that a state folder belongs to."""
    return home.parents[1] if tenant_of(home) else home


def read_tenants(installation: Path) -> dict[str, Tenant]:
    """The tenants of an installation, by name; none where it has no list of them.

    Raises:
        ConfigurationError: the list says what cannot be.
    """
    file = installation / FILE
    try:
        content = files.read_yaml(file, str(file))
    except FileNotFoundError:
        return {}
    for name in content:
        _check_name(str(name))
    return {
        name: checked(Tenant, fields or {}, f"{file}, {name}", "Nothing was done")
        for name, fields in content.items()
    }


def tenant_home(installation: Path, name: str) -> Path:
    """The state folder of a tenant.

    Raises:
        ConfigurationError: the installation has no such tenant.
    """
    if name not in (known := read_tenants(installation)):
        raise ConfigurationError(
            f"{installation} has no tenant {name!r}; expected {', '.join(known) or 'none'}. Add "
            f"it with `falaj tenants add`, or unset {TENANT}. Nothing was done"
        )
    return installation / FOLDER / name


def home_of(installation: Path, name: str) -> Path:
    """As `tenant_home`, also of the installation itself. Raises as that does."""
    return installation if name == INSTALLATION else tenant_home(installation, name)


def own_tenant(home: Path) -> Tenant:
    """What the installation says of the tenant of a state folder; no limits where it is nobody's.

    Raises:
        ConfigurationError: the list of tenants does not name it any more, or says what cannot be.
    """
    name, installation = tenant_of(home), installation_of(home)
    if not name:
        return Tenant()
    tenant_home(installation, name)
    return read_tenants(installation)[name]


def put_tenant(installation: Path, name: str, tenant: Tenant) -> Path:
    """Add a tenant, or change what it may hold; returns its state folder, its owner's alone.

    Raises:
        ConfigurationError: the name cannot be a folder's, or the folder is itself a tenant's.
        StorageError: the disk refuses.
    """
    _check_name(name)
    if of := tenant_of(installation):
        raise ConfigurationError(
            f"{installation} is the state of the tenant {of}, and tenants have none of their own; "
            f"name the installation: {installation_of(installation)}. Nothing was changed"
        )
    file = installation / FILE
    files.make_folder(installation)
    with files.locked(file.with_suffix(".lock")):
        known = {**read_tenants(installation), name: tenant}
        text = yaml.safe_dump({n: t.model_dump(exclude_defaults=True) for n, t in known.items()})
        files.write_atomically(file, text)
    files.private_folder(installation / FOLDER)
    return files.private_folder(installation / FOLDER / name)


def _check_name(name: str) -> None:
    if name == INSTALLATION or not re.fullmatch(NAME, name):
        raise ConfigurationError(
            f"{name!r} is no tenant; expected 1 to 40 small letters, digits and dashes, as it "
            f"names a folder, and another name than {INSTALLATION}. Nothing was changed"
        )
