"""Feature views of other tenants, each read as a raw table by a grant of its owner.

The owner's state gives the rows, by a command that works there with the owner's keys, location and
encryption: it looks up the grant, writes a line of the owner's journal, and copies the window's
rows to the reader. Nobody listens anywhere: one user of the operating system may open both states.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.data import SourceFile
from tasks.features.tables import copies
from tasks.features.tables.build import current_tables
from tasks.features.tables.raw_files import RawTable
from tasks.governance import identity
from tasks.governance.grants import SharedView, check_grant
from tasks.governance.handling import Handling
from tasks.governance.journal import Journal, process_identity
from tasks.kernel import errors, files, settings, tenants
from tasks.kernel.keys import address

WHO_ACTS = (identity.TOKEN_FILE, address.TOKEN_FILE, address.CA)
"""Variables that say by what a process shows who it is."""
KINDS = {kind.code: kind for kind in (errors.AccessError, errors.TransientError)}
"""Errors of the owner's side that are the same for the reader; others are of the configuration."""


class Reading(Contract):
    """What a tenant asks of the owner of a feature view."""

    table: dict[str, Any]
    """As it is declared; not all of it where a project begins."""
    tenant: str
    use_case: str
    purpose: str
    window: TimeWindow
    target: Path
    """Parquet file that gets the rows."""


def tenant_source(table: RawTable, repo: Path, window: TimeWindow, scratch: Path) -> copies.Source:
    """A feature view of another tenant, `tenant://TENANT/USE_CASE/VIEW`, maybe `@version`.

    Raises:
        AccessError: it was not granted, or this process may not open the owner's state.
        ConfigurationError: there is no such tenant, view or version, or its files are damaged.
        TransientError: the owner's state does not answer.
    """
    file, reader = repo / settings.USE_CASE_FILE, settings.Settings.from_environment().home
    declared = files.read_yaml(file, str(file)) if file.is_file() else {}  # else one begins here
    asked = Reading(
        table=table.model_dump(),
        tenant=tenants.name_of(reader),
        use_case=declared.get("name") or "",
        purpose=(declared.get("features") or {}).get("purpose") or "",
        window=window,
        target=scratch / "rows.parquet",
    )
    named = SharedView.of(table.uri).owner
    owner = tenants.home_of(tenants.installation_of(reader), named)
    if not os.access(owner, os.R_OK | os.W_OK | os.X_OK):
        raise errors.AccessError(
            f"the user {os.getuid()} of the operating system may not open {owner}; expected the "
            "right to read feature tables and grants there, and to write the journal. Let both "
            "tenants work as one user, or ask the owner to copy the rows to a bucket, and read "
            "that with credentials that may only read"
        )
    line = [sys.executable, "-m", "falaj", "--json", "grants", "read", asked.model_dump_json()]
    env, cwd = environment_of(owner), settings.PROJECT_ROOT
    done = subprocess.run(line, env=env, cwd=cwd, capture_output=True, text=True, check=False)
    if not done.stdout.startswith("{"):
        said = " ".join(done.stderr.split())[-1000:]
        raise errors.ConfigurationError(f"{owner} gave no answer ({done.returncode}): {said}")
    answer = json.loads(done.stdout)
    if refusal := answer.get("refusal"):
        raise KINDS.get(answer["code"], errors.ConfigurationError)(refusal)
    seen = SourceFile(**answer, num_bytes=asked.target.stat().st_size)
    return copies.Source(seen, lambda: [asked.target])


def environment_of(home: Path) -> dict[str, str]:
    """Of a process that works in another state: who acts stays, where this one is does not."""
    kept = {n: v for n, v in os.environ.items() if n in WHO_ACTS or not n.startswith("FALAJ_")}
    return {**kept, "FALAJ_HOME": str(home)}


def copy_granted(own: settings.Settings, asked: Reading) -> dict[str, str]:
    """Copy granted rows of a feature view of this state; each try is a line of its journal.

    Returns:
        Address of the view with the version that was read, and SHA-256 of its table.

    Raises:
        AccessError: it was not granted, or would be handled with less care there than here.
        ConfigurationError: there is no such view or version.
        ArtifactError: its files are gone or damaged.
    """
    table, home = RawTable.model_construct(**asked.table), own.home
    view, handling = SharedView.of(table.uri), Handling.of([table], asked.purpose)
    facts = {
        "who": {**process_identity(), "tenant": asked.tenant, "use_case": asked.use_case},
        "subject": {"view": f"{view.use_case}/{view.name}", "to": asked.tenant},
        "window": asked.window.model_dump(mode="json"),
    }
    journal = Journal(home / "audit")
    try:
        check_grant(home, view.use_case, view.name, asked.tenant, asked.purpose)
        tables = current_tables(settings.features_home_of(home, view.use_case), own.store)
        version, there = tables.version[:12], {table.name: table for table in tables.tables}
        ref = there.get(view.name)
        if ref is None or view.version not in ("", version):
            raise errors.ConfigurationError(
                f"{view} is not published; there is {', '.join(there) or 'nothing'} of version "
                f"{version}. Correct uri, or ask the owner to refresh it"
            )
        if tables.handling is None:
            raise errors.ConfigurationError(
                f"{view} was published by an earlier release, which noted no data class; ask its "
                "owner for a refresh"
            )
        if lacking := tables.handling.lacking(handling):
            raise errors.AccessError(
                f"the rows of {view} are declared with less care than by their owner; write "
                f"{', '.join(lacking)} beside uri"
            )
    except errors.FalajError as exc:
        journal.append("read-view", outcome="refused", reason=str(exc), **facts)
        raise
    with journal.recorded("read-view", version=version, **facts) as said:
        folder = own.store.path(ref.artifact)
        rows = ds.dataset(folder, format="parquet")
        copies.copy_window(rows, table, asked.window, asked.target)
        said["rows"] = pq.read_metadata(asked.target).num_rows
    return {"uri": str(view._replace(version=version)), "sha256": files.digest_of(folder)}
