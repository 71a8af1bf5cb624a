"""Taking a promotion back, on a real MLflow over SQLite."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from prefect import flow

from falaj.__main__ import main
from flows.config import PipelineConfig, read_pipeline_config
from flows.decision import decision_flow
from flows.drift_check import of_champion
from tasks.contracts.data import DataSplits
from tasks.contracts.release import Rollback, Withdrawal
from tasks.control.retraining.decision import Action
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import ClaimState, Outcome
from tasks.kernel.errors import RegistryError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import PROJECT_ROOT, Settings
from tasks.registry.mlflow_registry import CANDIDATE, Registry
from tasks.registry.programs import find_champion, find_incumbent
from tasks.registry.promotion import find_champion_state, roll_back, withdraw
from tests.support.control import builders as evidence
from tests.support.data.builders import month
from tests.support.registry.builders import CONFIG, World, comparison
from tests.support.services.prefect_platform import PrefectApi

NAME = CONFIG.model_name
NOW = datetime(2026, 3, 1, tzinfo=UTC)


@pytest.fixture
def world(world: World) -> World:
    """Version 2 has replaced version 1."""
    world.promoted(0)
    world.promoted(1, against=(comparison("champion:1", 0.004),))
    return world


def back(world: World, order: str = "order", replaced: int = 2) -> Rollback:
    return roll_back(NAME, replaced, "it hurts", order, world.location, NOW)


def test_the_champion_before_serves_again_and_the_record_says_why(world: World) -> None:
    before = find_champion_state(NAME, world.location, NOW)
    assert before.version.version == 2
    assert before.promoted_at is not None
    assert (before.previous.version, before.previous_trouble) == (1, None)

    record = back(world)

    assert world.champion == 1
    assert (record.restored.version, record.replaced.version) == (1, 2)
    assert find_champion(NAME, world.location, world.store).version == record.restored
    version = world.version(1)
    (kept,) = (world.registry.run_folder(version.run_id) / "rollback").iterdir()
    assert digest_of(kept) == version.tags["rollback_sha256"]
    assert Rollback.model_validate_json(kept.read_text()) == record
    after = find_champion_state(NAME, world.location, NOW)
    assert (after.version.version, after.promoted_at, after.previous) == (1, None, None)


def test_a_drift_check_compares_with_rows_that_its_champion_has_not_learnt(
    world: World, prefect_api: PrefectApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HOME", str(world.home))
    use_case = read_pipeline_config(PROJECT_ROOT / "feature_repo" / "flights")
    earlier = DataSplits(train=month(1), validation=month(2), test=month(3))
    config = use_case.model_copy(update={"registry": CONFIG, "splits": earlier})

    @flow
    def asked() -> PipelineConfig:
        return of_champion(config, find_champion(NAME, world.location, world.store))

    with prefect_api.in_process():
        found = asked()
    learnt = world.model(1).splits
    assert found.splits == learnt != earlier
    assert found.window.contains(learnt.validation)


def test_the_same_order_is_carried_out_once(world: World) -> None:
    assert back(world) == back(world)
    assert world.champion == 1
    with pytest.raises(RegistryError, match="version 1, and version 2 was to be rolled back"):
        back(world, "another order")


def test_a_version_whose_files_are_missing_never_serves_again(world: World) -> None:
    shutil.rmtree(world.version(1).folder)
    known = find_champion_state(NAME, world.location, NOW)
    assert "model.json is missing" in known.previous_trouble
    with pytest.raises(RegistryError, match="The alias was not moved"):
        back(world)
    assert world.champion == 2


def withdrawn(world: World, number: int = 2) -> Withdrawal:
    return withdraw(NAME, number, "mean of all time", "ana", world.location, NOW)


@pytest.mark.parametrize("change", [back, withdrawn])
def test_one_killed_before_the_alias_moved_is_done_by_the_next_call(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[World], object]
) -> None:
    def killed(registry: Registry, version: object, alias: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "set_alias", killed)
        with pytest.raises(KeyboardInterrupt):
            change(world)
    assert world.champion == 2
    change(world)
    assert world.champion == 1


@pytest.mark.timeout(300)
def test_the_controller_takes_back_a_promotion_that_hurts_once(
    prefect_api: PrefectApi, world: World
) -> None:
    ledger = Ledger(Settings.from_environment().metadata_url)
    result = ledger.store_result(NAME, "journeys", evidence.hurt(0), evidence.FREE)
    with prefect_api.in_process():
        decision_flow(result.result_id)
        decision_flow(result.result_id)
    assert world.champion == 1
    (claim,) = ledger.claims(ClaimState.ENDED)
    assert (claim.order.action, claim.end.state) == (Action.ROLL_BACK, "completed")

    # Now that version 1 serves, what was said of version 2 moves nothing more.
    late = ledger.store_result(NAME, "journeys", evidence.hurt(1), evidence.FREE)
    with prefect_api.in_process():
        (made,) = decision_flow(late.result_id).decisions
    assert made.outcome is Outcome.SUPERSEDED
    assert world.champion == 1


# Withdrawing


def test_a_withdrawn_champion_gives_way_and_is_never_promoted_again(world: World) -> None:
    record = withdrawn(world)

    assert world.champion == 1
    assert (record.version.version, record.champion.version) == (2, 1)
    version = world.version(2)
    (kept,) = (world.registry.run_folder(version.run_id) / "withdrawal").iterdir()
    assert digest_of(kept) == version.tags["withdrawal_sha256"]
    assert Withdrawal.model_validate_json(kept.read_text()) == record
    assert (version.tags["withdrawn"], version.tags["withdrawn_by"]) == ("mean of all time", "ana")
    # Traffic follows at once, as after a roll back.
    assert find_champion_state(NAME, world.location, NOW).promoted_at is None

    again = world.promoted(1, against=(comparison("champion:1", 0.004),))
    assert not again.promoted
    closed = {gate.name: gate.evidence for gate in again.gates if not gate.passed}
    assert closed == {"not-withdrawn": "version 2 was withdrawn: mean of all time"}
    honest = world.promoted(2, against=(comparison("champion:1", 0.002),))
    assert honest.promoted


def test_where_no_champion_is_left_the_next_candidate_is_compared_with_nobody(world: World) -> None:
    withdrawn(world, 1)
    assert world.champion == 2
    assert withdrawn(world, 2).champion is None
    assert world.champion is None
    assert world.registry.by_alias(NAME, CANDIDATE) is None
    model = world.model(2)
    assert find_incumbent(model, CONFIG, world.location, world.store) is None
    assert world.promoted(2).promoted


def test_the_command_withdraws_and_keeps_who_said_why(world: World) -> None:
    words = ["models", "withdraw", NAME, "2", "--approver", "ana", "--reason"]
    assert main([*words, " "]) == 2
    assert world.champion == 2
    assert main([*words, "it knows the future"]) == 0
    assert world.champion == 1
    (line,) = (world.home / "audit").rglob("*.jsonl")
    text = line.read_text()
    assert "it knows the future" in text
    assert f'"alias":"champion","to":"{NAME} version 1","before":"{NAME} version 2"' in text
