"""Tenants of an installation: teams that share its machine and issuer, with a state folder each.

    <installation>/tenants.yaml       who they are, and how much of the machine each may hold
    <installation>/tenants/<name>/    the state folder of one: registry, stores, models, pools, keys

What is in a tenant's folder, or at the addresses of its `server.yaml`, is no other tenant's.
"""

import os
import re
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt

from tasks.kernel import files
from tasks.kernel.errors import AccessError, ConfigurationError
from tasks.kernel.values import Contract, checked

TENANT = "FALAJ_TENANT"
"""Variable with the tenant whose state is worked on; without it, the installation's own."""
FOLDER, FILE = "tenants", "tenants.yaml"
NAME = r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*"
INSTALLATION = "installation"
"""Name of an installation's own state among those of its tenants; no tenant has it."""


class Tenant(Contract):
    """A team of an installation; `tenants.yaml` has one by name."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    contact: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
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


def has_tenants(home: Path) -> bool:
    """Whether the installation that a state folder belongs to has a list of tenants."""
    return (installation_of(home) / FILE).exists()


def read_tenants(installation: Path) -> dict[str, Tenant]:
    """The tenants of an installation, by name; none where it has no list of them.

    Raises:
        ConfigurationError: the list says what cannot be.
    """
    file = installation / FILE
    try:
        content = files.read_yaml(file, str(file)) if file.stat().st_size else {}
    except FileNotFoundError:
        return {}
    for name in content:
        _check_name(str(name))
    return {
        name: checked(Tenant, {} if said is None else said, f"{file}, {name}", "Nothing was done")
        for name, said in content.items()
    }


def tenant_home(installation: Path, name: str) -> Path:
    """The state folder of a tenant.

    Raises:
        ConfigurationError: the installation has no such tenant, or its folder is a link: whoever
            resolves it would work in another tenant's, or in nobody's.
    """
    if name not in (known := read_tenants(installation)):
        raise ConfigurationError(
            f"{installation} has no tenant {name!r}; expected {', '.join(known) or 'none'}. Add "
            f"it with `falaj tenants add`, or unset {TENANT}. Nothing was done"
        )
    if (folder := installation / FOLDER / name).resolve() != installation.resolve() / FOLDER / name:
        raise ConfigurationError(
            f"{folder} leads to {folder.resolve()}; expected a folder, for a link has no tenant. "
            "Mount the other disk there. Nothing was done"
        )
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is gone; bring it back from a backup, or begin anew with `falaj tenants add "
            f"{name}`. Nothing was done"
        )
    return folder


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
    check_installation(installation)
    file = installation / FILE
    files.make_folder(installation)
    with files.locked(file.with_suffix(".lock")):
        known = {**read_tenants(installation), name: tenant}
        text = yaml.safe_dump({n: t.model_dump(exclude_defaults=True) for n, t in known.items()})
        files.write_atomically(file, text)
    files.private_folder(installation / FOLDER)
    return files.private_folder(installation / FOLDER / name)


def check_installation(home: Path) -> None:
    """See that a state folder is an installation's own.

    Raises:
        ConfigurationError: it is a tenant's.
    """
    if of := tenant_of(home):
        raise ConfigurationError(
            f"{home} is the state of the tenant {of}, and tenants have none of their own; "
            f"name the installation: {installation_of(home)}. Nothing was changed"
        )


def check_own(path: Path) -> None:
    """See that a path leads to no state of others of this process's installation.

    Raises:
        AccessError: it does.
    """
    home = Path(os.environ.get("FALAJ_HOME") or ".").resolve()
    if not has_tenants(home):
        return
    others = installation_of(home) if tenant_of(home) else home / FOLDER
    if (leads := path.resolve()).is_relative_to(others) and not (
        tenant_of(home) and leads.is_relative_to(home)
    ):
        raise AccessError(
            f"{path} lies in {others}, with the state of others; a feature view of theirs is read "
            "as tenant://OWNER/USE_CASE/VIEW, by a grant. Nothing was read"
        )


def _check_name(name: str) -> None:
    if len(name) > 40 or name == INSTALLATION or not re.fullmatch(NAME, name):
        raise ConfigurationError(
            f"{name!r} is no tenant; expected 1 to 40 small letters, digits and single dashes, as "
            f"it names a folder, and another name than {INSTALLATION}. Nothing was changed"
        )
