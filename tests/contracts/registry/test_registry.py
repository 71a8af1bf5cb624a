"""The registry on a real MLflow over SQLite: registering, attaching, promoting."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.runtime import flow_run

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import ImportedProgram, tabular_signature
from tasks.contracts.release import PromotionDecision
from tasks.contracts.training import StartingPoint
from tasks.governance.handling import Handling
from tasks.kernel.errors import ConfigurationError, RegistryError
from tasks.kernel.files import digest_of
from tasks.registry import task as registry_tasks
from tasks.registry.candidate import IMPORTS, claim_model_name, register_import
from tasks.registry.config import PromotionConfig
from tasks.registry.mlflow_registry import CANDIDATE, CHAMPION
from tasks.registry.model_folder import attach_variants, read_version
from tasks.registry.programs import (
    fetch_version,
    find_champion,
    find_incumbent,
    find_start,
    find_trained,
)
from tests.support.data.builders import COLUMNS
from tests.support.registry import builders
from tests.support.registry.builders import CONFIG, World, comparison, evaluation
from tests.support.services.prefect_platform import PrefectApi, shown
from tests.support.suite.promises import Promise, proves

NAME = CONFIG.model_name


# Registering


def test_a_registered_version_holds_the_whole_model_and_its_run(
    tmp_path: Path, migrated: Path
) -> None:
    world = World.at(tmp_path).with_database_of(migrated)
    ref, report = world.register()
    world.attach(ref)

    version = world.mlflow.get_model_version_by_alias(NAME, CANDIDATE)
    run = world.mlflow.get_run(ref.run_id)
    folder = world.version(1).folder
    assert (ref.version, int(version.version), version.run_id) == (1, 1, ref.run_id)
    assert version.tags | {"manifest_sha256": "", "variants_sha256": ""} == {
        "program_sha256": ref.program_sha256,
        "snapshot_sha256": world.dataset.snapshot.data.sha256,
        "code_commit": "abc1234",
        "feature_service": "flight_delay_v1",
        "rival": "none",
        "kept_variants": "onnx-fp32",
        "manifest_sha256": "",
        "variants_sha256": "",
    }
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.betas"] == "[0.9, 0.99]"
    assert run.data.metrics["test_auc"] == report.overall.auc.value
    assert run.data.metrics["test_auc_low"] == report.overall.auc.low
    assert run.data.metrics["auc_difference_yardstick_high"] == pytest.approx(0.002)
    history = world.mlflow.get_metric_history(ref.run_id, "epoch_validation_auc")
    assert [(m.step, m.value) for m in history] == [(0, 0.70), (1, 0.71), (2, 0.72), (3, 0.73)]
    assert run.info.artifact_uri.startswith("mlflow-artifacts:/")  # relative, for any machine
    assert {path.name for path in folder.parent.iterdir()} == {"model", "pictures"}
    manifest = json.loads((folder / "model.json").read_text())
    assert manifest["snapshot_sha256"] == ref.snapshot_sha256
    assert digest_of(folder / "program.pt2") == ref.program_sha256
    listed = json.loads((folder / "variants.json").read_text())["variants"]
    assert [(e["variant"]["name"], e["variant"]["reason"], bool(e["folder"])) for e in listed] == [
        ("onnx-fp32", "three times as fast as PyTorch eager", True),
        ("openvino-int8", "loses 0.004 AUC, bound 0.002", False),
    ]
    assert (folder / listed[0]["folder"] / "weights" / "0.bin").exists()


def test_registering_the_same_model_again_changes_nothing_but_the_alias(world: World) -> None:
    first, _ = world.register(seed=0)
    second, _ = world.register(seed=1)
    assert world.alias(CANDIDATE) == second.version == 2

    again, _ = world.register(seed=0)

    assert again == first
    assert [v.number for v in world.registry.versions(NAME)] == [1, 2]
    assert world.alias(CANDIDATE) == 1
    assert len(world.mlflow.search_runs(["1"])) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_sha256": "f" * 64}, "evaluation is of program ffffffffffff"),
        ({"snapshot_sha256": "f" * 64}, "evaluation is of snapshot ffffffffffff"),
    ],
)
def test_an_evaluation_of_something_else_is_not_registered(
    world: World, change: dict[str, str], words: str
) -> None:
    report = builders.evaluation(world.store, world.model()).model_copy(update=change)

    with pytest.raises(RegistryError, match=f"{words}.*nothing was registered"):
        world.register_judged(world.model(), report)
    assert [v.number for v in world.registry.versions(NAME)] == []


def test_a_version_whose_files_were_damaged_is_passed_over_by_a_new_one(world: World) -> None:
    ref, _ = world.register()
    (world.version(1).folder / "program.pt2").unlink()

    again, _ = world.register()

    assert (ref.version, again.version) == (1, 2)
    assert world.alias(CANDIDATE) == 2


# Attaching


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": None}, "is kept but names no files"),
        ({"name": "../escape"}, "no folder name"),
        ({"name": "openvino-int8"}, "is there twice"),
        ({"source_sha256": "f" * 64}, "was made from program ffffffffffff"),
    ],
)
def test_variants_that_cannot_be_filed_are_refused(
    world: World, change: dict[str, Any], words: str
) -> None:
    ref, _ = world.register()
    made = builders.variants(world.store, ref.program_sha256)
    bad = (made[0].model_copy(update=change), made[1])

    with pytest.raises(RegistryError, match=f"{words}.*nothing was attached"):
        attach_variants(ref, bad, world.location, world.store)
    assert read_version(world.version(1)).variants is None


def test_variants_for_another_hardware_class_stay_when_one_is_converted_again(world: World) -> None:
    ref, report = world.register()
    for_cpu = world.attach(ref)
    for_gpu = tuple(v.model_copy(update={"hardware_class": "gpu"}) for v in for_cpu)
    attach_variants(ref, for_gpu, world.location, world.store)

    newer = world.attach(ref, "another graph")

    record = read_version(world.version(1))
    assert tuple(entry.variant for entry in record.variants.variants) == (*newer, *for_gpu)
    assert record.damage == ()
    assert world.promote(ref, report, newer).promoted
    stale = world.promote(ref, report, for_cpu)
    assert "not those that were presented" in str(stale.gates)


def test_an_import_whose_description_was_mended_is_another_version(world: World) -> None:
    program = world.model().program
    wrong = ImportedProgram(
        program=program,
        family="tensors",
        signature=tabular_signature(COLUMNS),
        origin={},
        files={"theirs.pt2": program.sha256},
        origin_sha256="a" * 64,
    )
    mended = wrong.model_copy(update={"family": "tabular", "columns": COLUMNS})

    refs = [
        register_import(imported, CONFIG, world.location, world.store, "abc1234")
        for imported in (wrong, mended, mended, wrong)
    ]

    assert [ref.version for ref in refs] == [1, 2, 2, 1]
    assert fetch_version(refs[1], world.location, world.store).family == "tabular"


def test_a_reference_from_another_registry_is_refused(world: World) -> None:
    ref, _ = world.register()
    elsewhere = ref.model_copy(update={"run_id": "0" * 32})

    with pytest.raises(RegistryError, match="different registries"):
        attach_variants(elsewhere, (), world.location, world.store)
    with pytest.raises(RegistryError, match="version 9 is not in the registry"):
        attach_variants(ref.model_copy(update={"version": 9}), (), world.location, world.store)


# Programs


def test_a_program_is_fetched_once_and_again_when_its_copy_is_damaged(world: World) -> None:
    ref, _ = world.register()
    fetched = fetch_version(ref, world.location, world.store)
    assert fetched.version == ref
    assert fetched.columns == world.model().columns
    copy = world.store.path(fetched.program)
    copy.write_bytes(b"damaged")

    assert fetch_version(ref, world.location, world.store) == fetched
    assert digest_of(world.store.path(fetched.program)) == ref.program_sha256
    shutil.rmtree(world.registry.version(NAME, ref.version).folder)
    with pytest.raises(RegistryError, match=r"model\.json is missing"):
        fetch_version(ref, world.location, world.store)


def test_a_version_is_found_with_the_splits_that_it_was_trained_on(world: World) -> None:
    with pytest.raises(RegistryError, match="has neither a champion nor a candidate"):
        find_trained(NAME, None, world.location)
    ref, _ = world.register()
    found = find_trained(NAME, None, world.location)
    assert found.version == ref
    assert found.splits == world.model().splits
    assert find_trained(NAME, ref.version, world.location) == found
    with pytest.raises(RegistryError, match="version 7 is not in the registry"):
        find_trained(NAME, 7, world.location)


def test_a_repeated_run_meets_the_same_rival_and_never_itself(world: World) -> None:
    def rival(seed: int) -> int | None:
        found = find_incumbent(world.model(seed), CONFIG, world.location, world.store)
        return None if found is None else found.version.version

    assert rival(0) is None
    assert world.promoted(0).promoted
    assert rival(0) is None  # the champion now, and it had no rival
    assert rival(1) == 1
    assert world.promoted(1, against=(comparison("champion:1", 0.002),)).promoted
    assert rival(1) == 1
    assert rival(0) == 2  # a champion of old meets the present one


def test_a_training_begins_with_the_champion_and_a_repeated_one_where_it_began_before(
    world: World,
) -> None:
    def start(training: dict[str, object]) -> StartingPoint | None:
        splits = world.model().splits
        return find_start(world.dataset, splits, training, NAME, world.location, world.store)

    assert start({"seed": 1}) is None
    assert world.promoted(0).promoted
    found = start({"seed": 1})
    assert (found.version.version, found.trained_on) == (1, world.model().splits.train)
    assert world.store.path(found.checkpoint).read_bytes().startswith(b"checkpoint 0 ")
    assert start(world.model(0).config) is None  # what made the champion began from scratch


def test_a_training_of_a_network_does_not_begin_with_trees(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trees = world.model().model_copy(update={"config": {"model": "gradient-boosting"}})
    report = evaluation(world.store, trees, 0.75)
    ref = world.register_judged(trees, report)
    world.registry.set_alias(world.registry.confirmed(ref), CHAMPION)
    found = find_start(world.dataset, trees.splits, {"seed": 1}, NAME, world.location, world.store)
    assert found is None
    assert "not a network whose weights mean the same here" in caplog.text


def test_a_model_of_personal_rows_says_so_in_its_record(world: World) -> None:
    world.register(0)
    assert "data_class" not in world.version(1).tags
    homes = Handling(data_class="personal", homes=("eu", "uae"), purpose="care")
    snapshot = world.dataset.snapshot.model_copy(update={"handling": homes})
    dataset = world.dataset.model_copy(update={"snapshot": snapshot})
    model = world.model(0)  # the same program and rows, declared since
    world.register_judged(model, evaluation(world.store, model, 0.75), dataset)
    tags = world.version(1).tags
    assert (tags["data_class"], tags["data_homes"], tags["data_purpose"]) == (
        "personal",
        "eu uae",
        "care",
    )


# Promoting


def test_the_first_candidate_through_the_gates_becomes_champion_and_the_decision_is_kept(
    world: World,
) -> None:
    decision = world.promoted()

    version = world.mlflow.get_model_version_by_alias(NAME, CHAMPION)
    assert decision.promoted
    assert decision.previous_champion is None
    assert int(version.version) == 1
    assert version.tags["promotion"] == "all gates open"
    assert version.tags["previous_champion"] == "none"
    (kept,) = (world.registry.run_folder(version.run_id) / "promotion").iterdir()
    assert digest_of(kept) == version.tags["promotion_sha256"]
    assert PromotionDecision.model_validate_json(kept.read_text()) == decision


def test_before_there_is_a_champion_the_refused_candidate_stands_in(world: World) -> None:
    assert find_champion(NAME, world.location, world.store) is None
    world.register(0)
    assert served(world).version == 1
    world.promoted(0)
    world.register(1)
    assert served(world).version == 1


def served(world: World) -> ModelVersionRef:
    return find_champion(NAME, world.location, world.store).version


def test_a_refused_candidate_leaves_the_champion_and_keeps_the_reasons(world: World) -> None:
    world.promoted(0)

    decision = world.promoted(1, against=(comparison("champion:1", -0.02),))

    assert not decision.promoted
    assert decision.previous_champion == 1
    assert [g.name for g in decision.gates if not g.passed] == ["champion"]
    assert world.champion == 1
    tags = world.version(2).tags
    assert tags["promotion"] == "refused: champion"
    assert "previous_champion" not in tags


def test_a_better_candidate_replaces_the_champion_and_a_repeated_call_moves_nothing(
    world: World,
) -> None:
    world.promoted(0)
    better = (comparison("champion:1", 0.004),)
    first = world.promoted(1, against=better)
    before = dict(world.version(2).tags)

    again = world.promoted(1, against=better)

    assert first.promoted
    assert again.promoted
    assert first.previous_champion == again.previous_champion == 1
    assert (
        "is the champion already" in next(g for g in again.gates if g.name == "champion").evidence
    )
    assert world.champion == 2
    assert dict(world.version(2).tags) == before


def test_a_champion_whose_files_were_lost_gives_way_to_the_same_model_registered_anew(
    world: World,
) -> None:
    world.promoted(0)
    shutil.rmtree(world.version(1).folder)

    decision = world.promoted(0)

    assert decision.promoted
    assert (decision.previous_champion, decision.candidate.version) == (1, 2)
    assert served(world).version == 2


def lose_program(world: World, ref: ModelVersionRef) -> None:
    (world.registry.version(NAME, ref.version).folder / "program.pt2").unlink()


def lose_snapshot(world: World, ref: ModelVersionRef) -> None:
    world.store.path(world.dataset.snapshot.data).unlink()


def damage_predictions(world: World, ref: ModelVersionRef) -> None:
    report = builders.evaluation(world.store, world.model())
    world.store.path(report.predictions).write_bytes(b"other numbers")


def edit_variants(world: World, ref: ModelVersionRef) -> None:
    path = world.registry.version(NAME, ref.version).folder / "variants.json"
    path.write_text(path.read_text().replace('"kept": false', '"kept": true'))


@proves(Promise.VALIDATED, "the gate is closed, the champion stays")
@pytest.mark.parametrize("tamper", [lose_program, lose_snapshot, damage_predictions, edit_variants])
def test_evidence_that_is_gone_or_was_tampered_with_closes_the_gate(
    world: World, tamper: Callable[[World, ModelVersionRef], None]
) -> None:
    ref, report = world.register()
    made = world.attach(ref)
    tamper(world, ref)

    decision = world.promote(ref, report, made)

    assert not decision.promoted
    assert "whole-artifacts" in [g.name for g in decision.gates if not g.passed]
    assert world.champion is None


# Tasks


def test_the_tasks_find_their_registry_in_the_environment_and_show_what_they_did(
    world: World, prefect_api: PrefectApi
) -> None:
    model, report = world.model(), builders.evaluation(world.store, world.model())

    @flow(name="registry-tasks")
    def release() -> tuple[UUID, ModelVersionRef, PromotionDecision]:
        assert registry_tasks.find_incumbent(model, CONFIG) is None
        ref = registry_tasks.register_candidate(model, report, world.dataset, CONFIG, "abc1234")
        made = builders.variants(world.store, ref.program_sha256)
        assert registry_tasks.attach_variants(ref, made) == ref
        decision = registry_tasks.promote_candidate(
            ref, report, world.dataset, made, PromotionConfig()
        )
        assert registry_tasks.fetch_version(ref).version == ref
        return flow_run.id, ref, decision

    with prefect_api.in_process():
        run_id, ref, decision = release()
        [registered] = shown("registered-model", run_id)
        [gates] = shown("promotion-gates", run_id)
    assert decision.promoted
    assert served(world) == ref
    assert f"version {ref.version}" in str(registered.description)
    rows = json.loads(str(gates.data))
    assert [row["gate"] for row in rows] == [gate.name for gate in decision.gates]


# Whose a model name is


def claim(
    world: World,
    use_case: str,
    service: str | None = "flight_delay_v1",
    *,
    reserve: bool = True,
    **changes: str,
) -> None:
    config = CONFIG.model_copy(update=changes)
    claim_model_name(use_case, service, config, world.location, reserve=reserve)


def test_a_model_name_of_another_use_case_is_refused_unless_it_is_adopted(world: World) -> None:
    claim(world, "flights")
    claim(world, "flights")
    world.register()
    for reserve in (False, True):
        with pytest.raises(ConfigurationError, match=r"belongs to use case flights.* houses"):
            claim(world, "houses", reserve=reserve)
    with pytest.raises(ConfigurationError, match="belongs to use case flights"):
        claim(world, "houses", adopts="shops")
    assert world.registry.owner(NAME) == "flights"
    claim(world, "houses", adopts="flights")
    claim(world, "houses")
    with pytest.raises(ConfigurationError, match="belongs to use case houses"):
        claim(world, "flights")
    assert world.alias(CANDIDATE) == 1


def test_a_model_of_an_earlier_release_is_its_feature_services(world: World) -> None:
    world.register()
    for use_case, service in ((IMPORTS, None), ("houses", "house_prices")):
        with pytest.raises(ConfigurationError, match="another feature service"):
            claim(world, use_case, service)
    claim(world, "flights")
    assert world.registry.owner(NAME) == "flights"
