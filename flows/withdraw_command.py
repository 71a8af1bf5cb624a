"""`python -m flows withdraw`: let a version never serve again, such as one that leaks."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import Any

from tasks.features.access.audit import AuditTrail, process_identity
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import Settings

LONGEST_REASON = 1000


def add_withdraw_command(commands: Any) -> None:
    """Declare the command and its arguments."""
    command = commands.add_parser(
        "withdraw", help="let a version never serve again; the champion before it takes over"
    )
    command.add_argument("model", help="registered model")
    command.add_argument("version", type=int, help="its version")
    command.add_argument("--reason", required=True, help="why, for the record")
    command.add_argument("--approver", required=True, metavar="NAME", help="who says so")


def withdraw_version(options: argparse.Namespace, settings: Settings) -> list[str]:
    """Mark the version, and let the champion before it, or nobody, be the champion.

    Raises:
        ConfigurationError: the reason or the name is none, or a release of the model is open.
        RegistryError: there is no such version.
    """
    from tasks.registry.connection import RegistryLocation
    from tasks.registry.standing import withdraw

    reason, by = options.reason.strip(), options.approver.strip()
    if not reason or not by or len(reason) > LONGEST_REASON:
        raise ConfigurationError(
            f"--reason has {len(reason)} characters and --approver {len(by)}; expected a reason of "
            f"1 to {LONGEST_REASON} and a name. Nothing was changed"
        )
    _check_no_release(options.model, settings)
    with AuditTrail(settings.home / "audit").recorded(
        "withdraw-version",
        said=reason,
        subject={"model": options.model, "version": f"version {options.version}"},
        who={**process_identity(), "subject": by},
    ):
        location, now = RegistryLocation.of(settings), datetime.now(UTC)
        record = withdraw(options.model, options.version, reason, by, location, now)
    champion = record.champion
    return [
        f"{'Withdrawn':<10}{record.version.name} version {record.version.version}: {reason}",
        f"{'Champion':<10}version {champion.version}"
        if champion
        else f"{'Champion':<10}none; a server that runs keeps what it has loaded until it is "
        "started again. Train and promote another version",
    ]


def _check_no_release(model: str, settings: Settings) -> None:
    from tasks.release.ledger import ReleaseLedger

    if settings.database_url is None and not settings.operation_file.exists():
        return
    release = ReleaseLedger(settings.operation_url).open_release(model)
    if release is not None:
        raise ConfigurationError(
            f"a release of {model} version {release.candidate} is open; end it first with `python "
            f"-m flows release rollback {model} --approver NAME`. Nothing was changed"
        )
