"""What a finished loop has left: the facts that several benches measure on."""

from __future__ import annotations

import json

from tasks.contracts.run import RunRecord
from tasks.kernel.settings import Settings


def newest_record(settings: Settings) -> RunRecord:
    """The record of the newest finished loop of a state folder.

    Raises:
        RuntimeError: there is none, or it cannot be read.
    """
    report = settings.reports / "latest" / "report.json"
    if not report.exists():
        raise RuntimeError(
            f"{report} does not exist: this is measured on the data of a finished loop. Run "
            "`make run` first, or name the state folder of one"
        )
    try:
        facts = json.loads(report.read_text())
        known = {k: v for k, v in facts.items() if k in RunRecord.model_fields}
        return RunRecord.model_validate(known)
    except ValueError as exc:  # no JSON, or not the record of this version
        raise RuntimeError(
            f"{report} is damaged or was written by another version ({exc}); run `make run` again"
        ) from exc
