"""The registry interrupted: killed or failing at every step, raced, and locked out."""

import multiprocessing
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from tasks.kernel.errors import RegistryError, TransientError
from tasks.registry.connection import load_mlflow
from tasks.registry.mlflow_registry import CANDIDATE, Registry
from tasks.registry.model_folder import read_version
from tests.support.registry import crashes
from tests.support.registry.builders import CONFIG, World

NAME = CONFIG.model_name
PROCESS_LIMIT_S = 120


@pytest.fixture(scope="session")
def processes() -> Any:
    """Starts processes from a clean one that has MLflow loaded and no threads."""
    load_mlflow()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["mlflow.store.tracking.sqlalchemy_store", "tests.support.registry.crashes"]
    )
    return context


def runs_of(world: World) -> list[Any]:
    """All runs of the experiment, deleted ones too."""
    return list(world.mlflow.search_runs(["1"], run_view_type=3))


def killed(processes: Any, target: Callable[..., None], *args: object) -> None:
    process = processes.Process(target=target, args=args)
    process.start()
    process.join(PROCESS_LIMIT_S)
    died_by = process.exitcode
    process.kill()
    assert died_by == -9


def assert_one_whole_candidate(world: World) -> None:
    registry = world.registry
    (version,) = registry.versions(NAME)
    assert read_version(version).damage == ()
    assert world.alias(CANDIDATE) == version.number == 1
    everything = runs_of(world)
    kept = [r for r in everything if r.info.lifecycle_stage == "active"]
    assert [(r.info.run_id, r.info.status) for r in kept] == [(version.run_id, "FINISHED")]
    assert all(r.info.status == "FAILED" for r in everything if r not in kept)
    folders = (world.location.artifacts / CONFIG.experiment).iterdir()
    assert [f.name for f in folders] == [version.run_id]


@pytest.mark.parametrize("step", crashes.REGISTER_STEPS)
def test_registering_killed_at_any_step_shows_no_half_version_and_then_completes(
    world: World, processes: Any, step: str
) -> None:
    killed(processes, crashes.register_and_die, world.home, step)

    for version in world.registry.versions(NAME):
        assert read_version(version).damage == ()
    world.register()
    assert_one_whole_candidate(world)


@pytest.mark.slow
def test_clearing_up_a_half_run_that_is_itself_cut_off_is_completed_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RegistryError("on purpose")

    for owner, name in ((Registry, "add_version"), (load_mlflow().MlflowClient, "delete_run")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(RegistryError, match="on purpose"):
                world.register()

    world.register()
    assert_one_whole_candidate(world)


@pytest.mark.slow
@pytest.mark.parametrize("step", crashes.ATTACH_STEPS)
def test_attaching_killed_at_any_step_completes_when_it_is_called_again(
    world: World, processes: Any, step: str
) -> None:
    ref, _ = world.register()
    old = world.attach(ref)
    killed(processes, crashes.attach_and_die, world.home, step, "newer graph")
    version = world.version(1)
    seen = read_version(version)
    if step in ("folder not renamed", "folders without list"):
        assert seen.damage == ()
        assert tuple(e.variant for e in seen.variants.variants) == old

    newer = world.attach(ref, "newer graph")

    record = read_version(world.version(1))
    assert record.damage == ()
    assert tuple(e.variant for e in record.variants.variants) == newer


@pytest.mark.slow
@pytest.mark.parametrize("step", crashes.PROMOTE_STEPS)
def test_promoting_killed_at_any_step_leaves_the_alias_and_then_completes(
    world: World, processes: Any, step: str
) -> None:
    killed(processes, crashes.promote_and_die, world.home, step)
    assert world.champion is None

    assert world.promoted().promoted
    assert world.champion == 1


@pytest.mark.slow
def test_two_processes_registering_at_once_make_one_version_of_each_model(
    tmp_path: Path, processes: Any
) -> None:
    world = World.at(tmp_path)
    start = processes.Barrier(2)
    both = [
        processes.Process(target=crashes.register_together, args=(tmp_path, seed, start))
        for seed in (1, 2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join(PROCESS_LIMIT_S)

    assert [process.exitcode for process in both] == [0, 0]
    versions = world.registry.versions(NAME)
    assert [v.number for v in versions] == [1, 2, 3]
    assert len({v.ref.program_sha256 for v in versions}) == 3
    assert all(read_version(v).damage == () for v in versions)
    assert world.alias(CANDIDATE) in (2, 3)
    assert {r.info.status for r in runs_of(world)} == {"FINISHED"}
    with sqlite3.connect(world.database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture
def impatient() -> Iterator[None]:
    """MLflow waits 20 s for a locked database; here it does not wait."""

    def shorten(
        connection: object, cursor: object, statement: str, parameters: object, *rest: object
    ) -> tuple[str, object]:
        return statement.replace("busy_timeout = 20000", "busy_timeout = 10"), parameters

    event.listen(Engine, "before_cursor_execute", shorten, retval=True)
    yield
    event.remove(Engine, "before_cursor_execute", shorten)


@pytest.mark.usefixtures("impatient")
def test_a_database_that_another_program_has_locked_is_a_transient_error(
    world: World, capfd: pytest.CaptureFixture[str]
) -> None:
    ref, _ = world.register()
    with sqlite3.connect(world.database, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TransientError, match="holds its lock"):
            world.attach(ref)
        other.execute("ROLLBACK")
    other.close()

    world.attach(ref)
    assert capfd.readouterr().err == ""
