"""The metadata database: migrated by many at once; old ones are adopted, newer ones refused.

`tests/support/control/landed`: tables and rows as the last release without versions wrote them.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from tasks.control.retraining.ledger import Ledger, result_id_of
from tasks.control.retraining.records import ClaimState
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT
from tasks.metadata import tables
from tasks.metadata.database import COPY, KEEP_ALIVE, MIGRATIONS, open_database, transaction
from tests.support.host.processes import python
from tests.support.services.servers import new_database

LANDED = PROJECT_ROOT / "tests" / "support" / "control" / "landed"
GROUPS = {
    "retraining": tuple(f"falaj_{n}" for n in ("governed", "verdicts", "episodes", "claim", "dec")),
    "releases": ("falaj_release",),
    "leases": ("falaj_lease",),
}


def make_landed(url: str, *groups: str) -> None:
    """A database as the landed release left it, with the tables of some of its parts."""
    is_sqlite = url.startswith("sqlite")
    if is_sqlite:
        Path(url.removeprefix("sqlite:///")).parent.mkdir(mode=0o700)
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    text = (LANDED / ("sqlite.sql" if is_sqlite else "postgresql.sql")).read_text()
    text += (LANDED / "rows.sql").read_text()
    wanted = tuple(name for group in groups for name in GROUPS[group])
    with engine.begin() as connection:
        if not is_sqlite:
            connection.exec_driver_sql("SET LOCAL timezone = 'UTC'")
        for statement in text.split(";\n"):
            if any(f" {name}" in statement.partition("(")[0] for name in wanted):
                connection.exec_driver_sql(statement)
    engine.dispose()


def differences(engine: sa.Engine) -> list[object]:
    """Where the tables are not as `tables` declares them."""
    with transaction(engine) as connection:
        options = {"version_table": tables.VERSION_TABLE, "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        return list(compare_metadata(context, tables.metadata))


@pytest.mark.parametrize("opened", [(), ("releases",)], ids=["new", "opened by one part alone"])
def test_migrations_make_the_tables_that_are_declared(url: str, opened: tuple[str, ...]) -> None:
    if opened:
        make_landed(url, *opened)
    engine = open_database(url)
    assert differences(engine) == []
    assert ScriptDirectory(str(MIGRATIONS)).get_heads() == [tables.VERSION]


def test_a_database_of_the_release_before_versions_is_adopted_with_its_data(url: str) -> None:
    make_landed(url, *GROUPS)
    ledger = Ledger(url)
    (action,) = ledger.claims(ClaimState.STARTED)
    assert action.started.run_id == "run-0"
    (decision,) = ledger.decisions()
    assert decision.version == decision.evidence.version == 1
    of = (decision.model, decision.use_case, decision.evidence)
    assert result_id_of(*of) == decision.result_id  # a renamed field is no new result
    with transaction(ledger.engine, reads_only=True) as connection:
        clock = connection.execute(sa.select(tables.actions.c.boot, tables.actions.c.uptime_s))
        assert clock.one() == ("an-earlier-boot", pytest.approx(2264.820578618))
        release = connection.execute(sa.select(tables.releases)).mappings().one()
        assert (release["candidate"], release["can_split"]) == ("2", True)
        assert release["opened_at"].isoformat() == "2026-11-23T12:00:00+00:00"
    for gone in ("falaj_claim_clocks", "falaj_leases"):
        assert not sa.inspect(ledger.engine).has_table(gone)
    if url.startswith("sqlite"):  # the way back
        copy = Path(url.removeprefix("sqlite:///")).with_name(COPY.format("unversioned"))
        with closing(sqlite3.connect(copy)) as kept:
            assert kept.execute("SELECT count(*) FROM falaj_claim_clocks").fetchone() == (1,)
    kinds = {kind for ((kind, *_),) in differences(ledger.engine)} - {"remove_table_comment"}
    assert kinds == set()


def test_many_processes_that_open_an_old_database_at_once_migrate_it_once(url: str) -> None:
    make_landed(url, "retraining", "leases")
    program = "import sys; from tasks.metadata.database import open_database as o; o(sys.argv[1])"
    started = [python("-c", program, url) for _ in range(5)]
    assert [one.wait(120) for one in started] == [0] * 5
    assert len(Ledger(url).claims(ClaimState.STARTED)) == 1


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_landed(url, *GROUPS)
    with monkeypatch.context() as patch:
        from alembic.operations import Operations

        patch.setattr(Operations, "drop_table", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            open_database(url)
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    assert not sa.inspect(engine).has_table(tables.VERSION_TABLE)
    assert "boot" not in {each["name"] for each in sa.inspect(engine).get_columns("falaj_claims")}
    engine.dispose()
    assert len(Ledger(url).claims(ClaimState.STARTED)) == 1


def test_a_database_of_a_newer_release_is_refused_and_left_alone(url: str) -> None:
    engine = open_database(url)
    with transaction(engine) as connection:
        connection.execute(sa.text(f"UPDATE {tables.VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(ConfigurationError, match="version 9999, this release knows versions up to"):
        Ledger(url)


def test_a_server_is_told_to_look_for_clients_that_are_gone(postgres: str) -> None:
    with transaction(open_database(new_database(postgres))) as connection:
        shown = [connection.exec_driver_sql(f"SHOW tcp_{name}").scalar() for name in KEEP_ALIVE]
    assert [int(str(value)) for value in shown] == list(KEEP_ALIVE.values())
