"""How the champion stands, and taking a promotion back: the alias returns to the one before.

As in a promotion, everything happens under one lock, the record is written first and the alias
moves last: a process killed earlier leaves the champion that was, and the next call does the rest.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import datetime

from tasks.contracts.release import ChampionStanding, Rollback
from tasks.errors import RegistryError
from tasks.registry.approval import WAITING, known_approval
from tasks.registry.connection import RegistryLocation, exclusive
from tasks.registry.mlflow_registry import (
    CHAMPION,
    PREVIOUS_TAG,
    RegisteredVersion,
    Registry,
)
from tasks.registry.model_folder import read_version
from tasks.settings import write_atomically

logger = logging.getLogger(__name__)

PROMOTED_AT_TAG = "promoted_at"
RESTORED_BY_TAG = "restored_by"  # order that made it champion again; empty after a promotion
ROLLBACK_SHA_TAG = "rollback_sha256"


def find_standing(name: str, location: RegistryLocation, now: datetime) -> ChampionStanding | None:
    """The champion, since when, and its predecessor; None where there is no champion.

    Args:
        name: registered model.
        location: the registry.
        now: this moment, UTC; a question whose time is over waits for nobody.

    Raises:
        RegistryError: the champion was not registered by this pipeline, or MLflow refused.
        TransientError: the registry was busy.
    """
    if location.database_path is not None and not location.database_path.exists():
        return None
    registry = Registry(location)
    champion = registry.by_alias(name, CHAMPION)
    if champion is None:
        return None
    former = _former(registry, champion)
    told = champion.tags.get(PROMOTED_AT_TAG)
    restored = champion.tags.get(RESTORED_BY_TAG)
    return ChampionStanding(
        version=champion.ref,
        promoted_at=datetime.fromisoformat(told) if told and not restored else None,
        former=former.ref if former else None,
        former_trouble=_trouble(former) if former else None,
        asked_about=_asked_about(registry, champion, now),
    )


def note_promotion(registry: Registry, version: RegisteredVersion, now: datetime) -> None:
    """Note on a version, just before it becomes champion, that a promotion makes it that."""
    registry.set_tags(version, {PROMOTED_AT_TAG: now.isoformat(), RESTORED_BY_TAG: ""})


def roll_back(
    name: str,
    replaced: int,
    reason: str,
    order_id: str,
    location: RegistryLocation,
    now: datetime,
) -> Rollback:
    """Point the alias `champion` at the champion before `replaced` again.

    The decision is kept as `rollback/<order>.json` with the run of the restored version and as its
    tags. Repeating an order that was carried out changes nothing and returns the same record.

    Args:
        name: registered model.
        replaced: version that must be the champion now.
        reason: why, for the record.
        order_id: who asked; one order rolls back once.
        location: the registry.
        now: moment for the record.

    Raises:
        RegistryError: another version is the champion by now, it has no predecessor, or that
            one's files are missing or damaged. The alias was not moved.
        TransientError: the registry was busy.
        StorageError: the disk refused; the alias was not moved.
    """
    registry = Registry(location)
    with exclusive(location):
        champion = registry.by_alias(name, CHAMPION)
        if champion is not None and champion.tags.get(RESTORED_BY_TAG) == order_id:
            return _read_record(registry, champion, order_id)
        if champion is None or champion.number != replaced:
            seen = "nobody" if champion is None else f"version {champion.number}"
            raise RegistryError(
                f"{name}: the champion is {seen}, and version {replaced} was to be rolled back; it "
                "was replaced in between. The alias was not moved; check drift of the champion"
            )
        former = _former(registry, champion)
        if former is None:
            raise RegistryError(
                f"{champion} has no predecessor to roll back to. The alias was not moved; train "
                "and promote another version"
            )
        if trouble := _trouble(former):
            raise RegistryError(
                f"{champion} cannot be rolled back to version {former.number}: {trouble}. The "
                "alias was not moved; restore its folder from a backup, or train another version"
            )
        record = Rollback(
            restored=former.ref, replaced=champion.ref, reason=reason, order_id=order_id, at=now
        )
        _write_record(registry, former, record)
        registry.set_alias(former, CHAMPION)
    logger.warning("%s is the champion again instead of version %d: %s", former, replaced, reason)
    return record


def _former(registry: Registry, champion: RegisteredVersion) -> RegisteredVersion | None:
    number = champion.tags.get(PREVIOUS_TAG, "")
    if not number.isdigit() or int(number) == champion.number:
        return None
    known = [v for v in registry.versions(champion.name) if v.number == int(number)]
    return known[0] if known else None


def _asked_about(registry: Registry, champion: RegisteredVersion, now: datetime) -> int | None:
    later = [v for v in registry.versions(champion.name) if v.number > champion.number]
    for version in sorted(later, key=lambda v: -v.number):
        try:
            approval = known_approval(version)
        except RegistryError as exc:  # its promotion is refused; the champion stands
            logger.warning("%s", exc)
            continue
        if approval is not None and approval.state == WAITING and now < approval.deadline:
            return version.number
    return None


def _trouble(version: RegisteredVersion) -> str | None:
    """Why a version cannot serve; None where every file has its digest."""
    record = read_version(version)
    problems = list(record.damage)
    if record.manifest is None and record.imported is None and not problems:
        problems.append("it has no readable manifest")
    if record.variants is None and not problems:
        problems.append("it has no converted variants, so nothing could serve it")
    return "; ".join(problems) or None


def _write_record(registry: Registry, version: RegisteredVersion, record: Rollback) -> None:
    text = record.model_dump_json(indent=1) + "\n"
    path = registry.run_folder(version.run_id) / "rollback" / f"{record.order_id[:32]}.json"
    write_atomically(path, text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    registry.set_tags(version, {ROLLBACK_SHA_TAG: digest, RESTORED_BY_TAG: record.order_id})


def _read_record(registry: Registry, version: RegisteredVersion, order_id: str) -> Rollback:
    path = registry.run_folder(version.run_id) / "rollback" / f"{order_id[:32]}.json"
    try:
        return Rollback.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise RegistryError(
            f"{version} was restored by order {order_id[:12]}, and its record {path.name} is gone; "
            "the alias stays as it is"
        ) from exc
