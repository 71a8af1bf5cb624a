"""The newest drift verdict on each served model, from the controller's record."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from tasks.contracts.drift import DriftVerdict
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import StoredVerdict
from tasks.kernel.errors import FalajError
from tasks.kernel.settings import Settings

logger = logging.getLogger(__name__)
FINE = (DriftVerdict.STABLE,)
TROUBLE = (DriftVerdict.RETRAIN, DriftVerdict.DATA_FAULT)


class DriftVerdicts:
    """Verdicts as they were found at the last look; looking is for a thread.

    Args:
        settings: where the database of operation and the use case are.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger: Ledger | None = None
        self._found: dict[str, Mapping[str, Any] | None] = {}

    def of(self, model: str) -> Mapping[str, Any] | None:
        """The newest verdict on a model, None before the first."""
        return self._found.get(model)

    def look(self, models: Iterable[str]) -> None:
        """Read the newest verdicts; what was found before stays where the database is away."""
        try:
            ledger = self._opened()
            if ledger is None:
                return
            for model in models:
                stored = ledger.newest_verdict(model, self._settings.use_case)
                self._found[model] = None if stored is None else _report_of(stored)
        except FalajError as exc:
            logger.warning("the newest drift results were not read: %s", exc)

    def _opened(self) -> Ledger | None:
        """The record; None where there is none yet, which looking must not make."""
        if self._ledger is None:
            is_file = self._settings.database_url is None
            if is_file and not self._settings.metadata_file.exists():
                return None
            self._ledger = Ledger(self._settings.metadata_url)
        return self._ledger


def _report_of(stored: StoredVerdict) -> dict[str, Any]:
    evidence = stored.evidence
    return {
        "verdict": evidence.verdict.value,
        "is_fine": evidence.verdict in FINE,
        "is_trouble": evidence.verdict in TROUBLE,
        "version": str(evidence.version),
        "window": {
            "start": evidence.window.start.isoformat(),
            "end": evidence.window.end.isoformat(),
        },
        "stored_at": stored.stored_at.isoformat(timespec="seconds"),
        "num_features": evidence.num_features,
        "num_drifted": evidence.num_drifted,
        "drifted": list(evidence.drifted),
        "sentences": list(evidence.sentences),
    }
