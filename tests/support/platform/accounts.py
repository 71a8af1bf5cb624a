"""What the databases and journals of a state folder say, read past all of the project's own code.

Plain SQL on files that are opened for reading only, and plain JSON lines: an account of what
happened that no client, flow or recovery of ours has had a hand in.
"""

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tasks.kernel.files import is_held

NOTHING: Mapping[str, object] = {}
UNFINISHED = """
SELECT flow_run.name || ' is ' || flow_run.state_name
FROM flow_run JOIN flow ON flow.id = flow_run.flow_id
WHERE flow_run.state_type IN ('RUNNING', 'PENDING', 'CANCELLING')
  AND flow.name NOT IN ('recovery-sweep', 'retraining-sweep')
"""
UNFINISHED_STEPS = """
SELECT flow_run.name || ': ' || task_run.name || ' is Running'
FROM task_run JOIN flow_run ON flow_run.id = task_run.flow_run_id
JOIN flow ON flow.id = flow_run.flow_id
WHERE task_run.state_type = 'RUNNING' AND flow.name NOT IN ('recovery-sweep', 'retraining-sweep')
"""
STAGE_RUNS = """
SELECT idempotency_key, state_name FROM flow_run
WHERE substr(idempotency_key, 1, 37) = :loop || ':' ORDER BY created
"""
COMPLETIONS = """
SELECT flow_run.idempotency_key FROM flow_run_state
JOIN flow_run ON flow_run.id = flow_run_state.flow_run_id
WHERE substr(flow_run.idempotency_key, 1, 37) = :loop || ':'
  AND flow_run_state.type = 'COMPLETED'
"""
STEPS = """
SELECT task_run.name, count(*) FROM task_run
JOIN flow_run ON flow_run.id = task_run.flow_run_id
WHERE (substr(flow_run.idempotency_key, 1, 37) = :loop || ':'
       OR CAST(flow_run.id AS TEXT) = :loop)
  AND task_run.state_name = 'Completed'
GROUP BY task_run.name
"""
SLOTS = "SELECT coalesce(sum(active_slots), 0) FROM concurrency_limit_v2"
CHAMPIONS = """
SELECT name, CAST(version AS INTEGER) FROM registered_model_aliases WHERE alias = 'champion'
"""
DECIDED = """
SELECT CAST(decided.version AS INTEGER), decided.value
FROM model_version_tags AS decided LEFT JOIN model_version_tags AS promoted
  ON promoted.name = decided.name AND promoted.version = decided.version
  AND promoted.key = 'promoted_at'
WHERE decided.name = :name AND decided.key = 'promotion_sha256' ORDER BY promoted.value
"""
STAGES = ("feature-refresh", "training", "conversion", "promotion", "drift-check")


@dataclass(frozen=True)
class Account:
    """What is written about one state folder.

    Attributes:
        home: the folder.
        postgresql: URI of Prefect's database; None: the SQLite file in the folder.
        registry: URI of the database that has MLflow's schema; None: the SQLite file.
    """

    home: Path
    postgresql: str | None = None
    registry: str | None = None

    def stage_runs(self, loop: str) -> dict[str, list[str]]:
        """States of the runs that each stage of a loop was given to, in the order of attempts."""
        found: dict[str, list[str]] = {}
        for key, state in self._prefect(STAGE_RUNS, loop):
            found.setdefault(str(key).split(":")[1], []).append(str(state))
        return found

    def completions(self, loop: str) -> dict[str, int]:
        """How often each stage of a loop came to its end, by the history of states."""
        return dict(Counter(str(key).split(":")[1] for (key,) in self._prefect(COMPLETIONS, loop)))

    def steps(self, loop: str) -> dict[str, int]:
        """How often each task of a loop, in all its stages, was run to its end, not reused."""
        return {str(name): int(str(count)) for name, count in self._prefect(STEPS, loop)}

    def unfinished(self) -> list[str]:
        """Runs that have not ended, without the sweeps, which come and go."""
        return [str(told) for (told,) in self._prefect(UNFINISHED)]

    def unfinished_steps(self) -> list[str]:
        """Task runs that have not ended, but for those of the sweeps."""
        return [str(told) for (told,) in self._prefect(UNFINISHED_STEPS)]

    def slots(self) -> int:
        """Concurrency slots that are taken."""
        ((taken,),) = self._prefect(SLOTS)
        return int(str(taken))

    def leases(self) -> list[str]:
        """Device leases, held or waited for."""
        files = (self.home / "leases").glob("*/*.json")
        return [file.read_text() for file in files if is_held(file)]

    def repeated_builds(self) -> list[str]:
        """Things of the artifact store that were built more than once."""
        journal = self.home / "artifacts" / "builds.jsonl"
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
        counts = Counter((line["kind"], line["key"]) for line in lines)
        return [f"{kind}/{key}: {n} times" for (kind, key), n in counts.items() if n > 1]

    def champion(self) -> tuple[str, int]:
        """Model and version that the alias names.

        Raises:
            AssertionError: there is not one such, or its promotion is half done: its record is
                missing, says otherwise, or a later promotion's names another version.
        """
        ((name, number),) = self._registry(CHAMPIONS, "")
        promoted = []
        for version, digest in self._registry(DECIDED, str(name)):
            [file] = self.home.glob(f"mlflow/artifacts/**/promotion/{str(digest)[:12]}.json")
            content = file.read_bytes()
            assert hashlib.sha256(content).hexdigest() == digest, file
            decision = json.loads(content)
            assert decision["candidate"]["version"] == version, file
            if decision["promoted"]:
                promoted.append(version)
        assert promoted, f"{name} version {number} is the champion, and nothing says why"
        assert promoted[-1] == number, f"{promoted} were promoted, the champion is {number}"
        return str(name), int(str(number))

    def _registry(self, query: str, name: str) -> list[tuple[object, ...]]:
        if self.registry is None:
            return rows_of(self.home / "mlflow" / "mlflow.db", query, {"name": name})
        with psycopg.connect(self.registry, options="-c search_path=mlflow") as connection:
            asked = query.replace(":name", "%(name)s::text")
            return connection.execute(asked.encode(), {"name": name}).fetchall()

    def _prefect(self, query: str, loop: str = "") -> list[tuple[object, ...]]:
        if self.postgresql is None:
            file = self.home / "platform" / "prefect" / "prefect.db"
            return rows_of(file, query, {"loop": loop})
        with psycopg.connect(self.postgresql) as connection:
            asked = query.replace(":loop", "%(loop)s::text")
            return connection.execute(asked.encode(), {"loop": loop}).fetchall()


def rows_of(
    database: Path, query: str, values: Mapping[str, object] = NOTHING
) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=60)) as connection:
        return connection.execute(query, values).fetchall()
