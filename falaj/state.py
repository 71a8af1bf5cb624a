"""Commands of the state as a whole: backup, restore, prune, and the move to a server."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from falaj.context import DryRun, Here, Shown, row
from tasks.governance.handling import Placement
from tasks.governance.policy import require_placements
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.location import Location
from tasks.kernel.settings import SERVER_NAMES, USE_CASE_FILE, Settings, server_environment
from tasks.metadata.database import open_database
from tasks.registry.connection import RegistryLocation, prepare_database
from tasks.state import backup as backups
from tasks.state.databases import MLFLOW, OPERATION, name_of_state
from tasks.state.erase import erase_restored, known_entities
from tasks.state.move import examine, nobody_else
from tasks.state.move import migrate as move
from tasks.state.prune import plan_pruning
from tasks.state.prune import prune as remove

NICENESS = 10
"""Of a backup: a loop that runs at the same time goes first."""
Where = Annotated[str, Parameter(help="Folder, file:// or s3://bucket/prefix of the backups.")]


def backup(
    where: Where,
    /,
    *,
    listed: Annotated[bool, Parameter(name="--list", show_default=False)] = False,
    verify: bool = False,
    secrets: bool = False,
    context: Here,
) -> Shown:
    """Copy the whole state, while it is used; what is there already is not sent again.

    Args:
        listed: Show the backups that are there.
        verify: Read the newest backup, and compare all content with its digests.
        secrets: Keys and certificates too.

    Examples:
        falaj backup /mnt/backups
        falaj backup s3://bucket/backups --list
    """
    target = location_of(where)
    if listed:
        names = backups.list_backups(target)
        return Shown({"backups": names}, names or ["no backups"])
    if verify:
        found = backups.read_backup(target, of=name_of_state(context.settings) or None)
        backups.verify(target, found)
        made = "every digest is right"
    else:
        os.nice(NICENESS)
        settings = context.settings
        require_placements(settings, [Placement("backup", target.url, "backup")])
        if target.folder is not None and target.folder.is_relative_to(settings.home):
            raise ConfigurationError(
                f"{where} is in the state folder {settings.home}; expected a place outside it. "
                "Nothing was copied"
            )
        found = backups.back_up(settings, target, _prepare(settings.home), _say, secrets=secrets)
        made = "whole" if secrets else "whole, without secrets"
    context.subject.update(backup=found.name, location=target.url)
    facts = {"backup": found.name, "files": len(found.files), "bytes": found.num_bytes}
    shown = f"{found.name}: {len(found.files)} files, {_size(found.num_bytes)}; {made}"
    return Shown({**facts, "location": target.url}, [row("Backup", shown)])


def restore(
    where: Where,
    /,
    *,
    name: Annotated[str | None, Parameter(name="--backup")] = None,
    context: Here,
) -> Shown:
    """Bring a backup into an empty state: the folder of --home, or the stores of the environment.

    Entities that were erased since, by the folder's list and those of the backups, are erased
    again.

    Args:
        name: Of the backup (default: the newest).

    Examples:
        falaj restore /mnt/backups --home /srv/falaj
    """
    settings, source = context.target, location_of(where)
    require_placements(settings)
    found = backups.read_backup(source, name)
    with nobody_else(settings.home):
        erased = known_entities(settings, source, found)
        then = partial(erase_restored, settings, erased)
        backups.restore(settings, source, found, _prepare(settings.home), _say, then=then)
    context.subject.update(backup=found.name, location=source.url)
    lacking = "" if found.secrets else "; its keys were not in it, new ones are made when needed"
    shown = f"{found.name} is in {settings.home}, every digest right{lacking}"
    return Shown({"backup": found.name, "home": settings.home}, [row("Restored", shown)])


def prune(
    *,
    keep: PositiveInt = 5,
    older: timedelta = timedelta(days=30),
    backups: str | None = None,
    context: Here,
) -> Shown:
    """Show what nothing needs any more; with --yes, remove it.

    What a registered version, a published table, the audit trail or a report that is kept names
    always stays, but for rows that are older than `retention` of the use case allows. A run that
    failed longer ago can be started again then, but not retried.

    Args:
        keep: Newest reports whose results stay, and backups.
        older: What is younger stays, such as 30d.
        backups: Location whose old backups go too.

    Examples:
        falaj prune
        falaj prune --keep 10 --older 90d --yes
    """
    from flows.config import read_pipeline_config

    settings, others = context.settings, location_of(backups) if backups else None
    with nobody_else(settings.home) if context.assume_yes else nullcontext():
        is_project = (settings.feature_repo / USE_CASE_FILE).is_file()
        config = read_pipeline_config(settings.feature_repo) if is_project else None
        days = config.retention if config else {}
        found = plan_pruning(settings, keep, older, others, days)
        if context.assume_yes:
            remove(settings, found, others)
    kinds: dict[str, list[int]] = {}
    for name, num_bytes in found.builds.items():
        kinds.setdefault(name.split("/")[0], []).append(num_bytes)
    kinds |= {"logs": [*found.logs.values()], "results": [*found.results.values()]}
    kinds["objects"] = [*found.objects.values()]
    lines = [row(kind, f"{len(s)}, {_size(sum(s))}") for kind, s in kinds.items() if s]
    lines += [row("backup", each) for each in found.backups]
    context.subject["removed"] = context.assume_yes
    end = "Removed" if context.assume_yes else "Nothing was removed; --yes removes it"
    facts = {"removed": context.assume_yes, "builds": found.builds, "backups": found.backups}
    facts |= {"logs": [*map(str, found.logs)], "results": len(found.results)}
    return Shown({**facts, "objects": len(found.objects)}, [*(lines or ["nothing may go"]), end])


def migrate(
    *, to: Annotated[Path, Parameter(name="--to")], dry_run: DryRun = False, context: Here
) -> Shown:
    """Move the state of a folder to S3, PostgreSQL and Redis; a move that was cut off goes on.

    Args:
        to: YAML file with state, database and redis; ${NAME} is a variable of the environment.

    Examples:
        falaj migrate --to server.yaml --dry-run
    """
    settings = context.settings
    if not to.is_file():
        raise ConfigurationError(f"{to} does not exist; expected a YAML file. Nothing was changed")
    other = {n: v for n, v in os.environ.items() if n not in SERVER_NAMES.values()}
    server = server_environment(to, other)
    target = Settings.from_environment({**other, **server})
    target = replace(target, home=settings.home, feature_repo=settings.feature_repo)
    require_placements(settings, environment={**other, **server})
    num_files, num_bytes = examine(settings, target, server.get("FALAJ_REDIS"))
    lines = [row("Moves", f"{num_files} files, {_size(num_bytes)}"), row("To", target.location.url)]  # type: ignore[union-attr]
    facts = {"files": num_files, "bytes": num_bytes, "moved": not dry_run}
    if dry_run:
        return Shown(facts, [*lines, "All places answer. Nothing was changed"])
    with nobody_else(settings.home):
        move(settings, target, to.read_text(), _prepare(settings.home), _say)
    return Shown(facts, [*lines, row("Moved", "all commands on this folder use the new places")])


def location_of(where: str) -> Location:
    """The place of backups that a command names, as a folder or a URL."""
    if urlsplit(where).scheme:  # also `s3:/bucket`, which would be a folder here
        return Location.of(where, "the location")
    return Location.of(Path(where).expanduser().resolve().as_uri(), "the location")


def _prepare(home: Path) -> dict[str, Callable[[str], None]]:
    """What makes the tables of each database."""
    artifacts = home / "mlflow" / "artifacts"
    return {
        OPERATION: lambda url: open_database(url).dispose(),
        MLFLOW: lambda url: prepare_database(RegistryLocation(url, artifacts)),
    }


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
