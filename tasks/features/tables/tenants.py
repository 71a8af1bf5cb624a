"""Feature views of other tenants, each read as a raw table by a grant of its owner.

The owner's state gives the rows, by a command that works there with the owner's keys, location and
encryption: it looks up the grant, writes a line of the owner's journal, and copies the window's
rows to the reader. Nobody listens anywhere: one user of the operating system may open both states.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import SourceFile
from tasks.features.tables import copies
from tasks.features.tables.build import current_tables
from tasks.features.tables.formats import own_names
from tasks.features.tables.raw_files import RawTable
from tasks.governance.grants import SharedView, check_grant
from tasks.governance.handling import Handling
from tasks.governance.journal import Journal, process_identity
from tasks.kernel import errors
from tasks.kernel.files import digest_of, read_yaml
from tasks.kernel.keys.choice import TRUSTED
from tasks.kernel.keys.encryption import ENCRYPTION
from tasks.kernel.settings import (
    PROJECT_ROOT,
    SERVER_NAMES,
    USE_CASE_FILE,
    Settings,
    features_home_of,
)
from tasks.kernel.tenants import TENANT, home_of, installation_of, name_of

OF_READER = {*SERVER_NAMES.values(), ENCRYPTION, TENANT, TRUSTED}
"""Variables about the reader's state, and whom it trusts; the owner's says so itself, and
trusts its own keys alone."""
TIME = "event_timestamp"
KINDS = (errors.AccessError, errors.TransientError, errors.ArtifactError)
"""Errors of the owner's side that are the same for the reader; others are of the configuration."""


class Reading(Contract):
    """What a tenant asks of the owner of a feature view."""

    uri: str
    tenant: str
    use_case: str
    handling: Handling
    """As the raw table is declared, and the use case's purpose."""
    window: TimeWindow | None
    """None: the table is declared without a time column or by another, and read whole."""
    target: Path
    """Parquet file that gets the rows."""


def tenant_source(table: RawTable, repo: Path, window: TimeWindow, scratch: Path) -> copies.Source:
    """A feature view of another tenant, `tenant://TENANT/USE_CASE/VIEW`, maybe `@version`.

    Raises:
        AccessError: it was not granted, or this process may not open the owner's state.
        ConfigurationError: there is no such tenant, view or version.
        TransientError, ArtifactError: the owner's state has a fault.
    """
    view, settings = SharedView.of(table.uri), Settings.from_environment()
    assert view  # by its scheme
    declared = {}
    with suppress(FileNotFoundError):  # of a project that is being begun
        declared = read_yaml(repo / USE_CASE_FILE, USE_CASE_FILE)
    purpose = (declared.get("features") or {}).get("purpose") or ""
    asked = Reading(
        uri=table.uri,
        tenant=name_of(settings.home),
        use_case=declared.get("name") or "",
        handling=Handling.of([table], purpose),
        window=window if own_names(table).get(table.time_column or "") == TIME else None,
        target=scratch / "rows.parquet",
    )
    found = _asked(view.owner, installation_of(settings.home), asked)
    num_bytes = asked.target.stat().st_size
    seen = SourceFile(uri=found["uri"], sha256=found["sha256"], num_bytes=num_bytes)
    return copies.Source(seen, lambda: [asked.target])


def _asked(owner: str, installation: Path, asked: Reading) -> dict[str, Any]:
    """What the owner's state answers; it has written the rows."""
    try:
        home = home_of(installation, owner)
        is_open = os.access(home, os.R_OK | os.W_OK | os.X_OK)
    except PermissionError:
        is_open = False
    if not is_open:
        raise errors.AccessError(
            f"this process, of the user {os.getuid()} of the operating system, may not open the "
            f"state of {owner} of {installation}; it needs the right to read the feature tables "
            "and grants there and to write the journal. Let both work as one user, or ask the "
            "owner to copy the rows to a bucket, and read that with credentials that may only read"
        )
    own = {name: value for name, value in os.environ.items() if name not in OF_READER}
    done = subprocess.run(
        [sys.executable, "-m", "falaj", "--json", "grants", "read", asked.model_dump_json()],
        env={**own, "FALAJ_HOME": str(home)},
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as exc:
        last = " ".join(done.stderr.split())[-1000:]
        raise errors.ConfigurationError(
            f"the state of {owner} gave no answer ({done.returncode}): {last}"
        ) from exc
    if refusal := answer.get("refusal"):
        kind = next((k for k in KINDS if k.code == answer["code"]), errors.ConfigurationError)
        raise kind(refusal)
    return answer


def copy_granted(settings: Settings, asked: Reading) -> dict[str, object]:
    """Copy granted rows of a feature view of this state; each try is a line of its journal.

    Returns:
        Address of the view with the version that was read, and SHA-256 of its table.

    Raises:
        AccessError: it was not granted, or would be handled with less care there than here.
        ConfigurationError: there is no such view or version.
        ArtifactError: its files are gone or damaged.
    """
    view = SharedView.of(asked.uri)
    assert view  # by its scheme
    who = {**process_identity(), "tenant": asked.tenant, "use_case": asked.use_case}
    subject = {"view": f"{view.use_case}/{view.name}", "to": asked.tenant}
    facts = {
        "who": who,
        "subject": subject,
        "window": asked.window and asked.window.model_dump(mode="json"),
    }
    journal = Journal(settings.home / "audit")
    try:
        purpose = asked.handling.purpose
        check_grant(settings.home, view.use_case, view.name, asked.tenant, purpose)
        tables = current_tables(features_home_of(settings.home, view.use_case), settings.store)
        version, there = tables.version[:12], {table.name: table for table in tables.tables}
        ref = there.get(view.name)
        if ref is None or tables.handling is None or view.version not in ("", version):
            raise errors.ConfigurationError(
                f"{view} is not published; there is {', '.join(there) or 'nothing'} of version "
                f"{version}. Correct uri, or ask the owner to refresh it with this release"
            )
        if lacking := tables.handling.lacking(asked.handling):
            raise errors.AccessError(
                f"the rows of {view} are declared with less care than by their owner; write "
                f"{', '.join(lacking)} beside uri"
            )
    except errors.FalajError as exc:
        journal.append("read-view", outcome="refused", reason=str(exc), **facts)
        raise
    with journal.recorded("read-view", version=version, **facts) as said:
        folder = settings.store.path(ref.artifact)
        said["rows"] = _copy(folder, asked)
    return {"uri": str(view._replace(version=version)), "sha256": digest_of(folder)}


def _copy(folder: Path, asked: Reading) -> int:
    rows, condition = ds.dataset(folder, format="parquet"), None
    if asked.window:
        table = RawTable.model_construct(columns={TIME: "TIMESTAMPTZ"}, time_column=TIME)
        condition = copies.inside_window(rows.schema, table, asked.window)
    copies.write_rows(rows.scanner(filter=condition).to_reader(), asked.target)
    return int(pq.read_metadata(asked.target).num_rows)
