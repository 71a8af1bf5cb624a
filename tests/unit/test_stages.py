"""What a loop says of its stages: made, or reused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from prefect import Flow

from flows import pipeline
from flows.config import read_pipeline_config
from flows.stages import Stages
from tasks.contracts.base import Artifact, Contract
from tasks.control.config import RoutingConfig
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder


class Model(Contract):
    weights: Artifact


def built(store: ArtifactStore, key: str) -> Model:
    def build(folder: StagedFolder) -> Model:
        (folder.path / "weights").write_text(key)
        return Model(weights=folder.artifact("weights"))

    return store.build_once("models", key, Model, build)


def reused(store: ArtifactStore, stage: Callable[[], object]) -> bool:
    def fn() -> Any:
        return stage()

    fn.fn = fn  # type: ignore[attr-defined]  # as a flow has it, without a server
    stages = Stages("flights", RoutingConfig(mode="in process"), store)
    stages.run("training", cast(Flow[..., Any], fn))
    return stages.times[0].reused


def test_a_stage_that_built_what_it_returns_is_not_reused_and_its_repetition_is(
    store: ArtifactStore,
) -> None:
    assert not reused(store, lambda: {"models": [built(store, "a")]})
    assert reused(store, lambda: {"models": [built(store, "a")]})


def test_what_another_loop_builds_meanwhile_says_nothing_of_a_stage(store: ArtifactStore) -> None:
    built(store, "a")

    def stage() -> Model:
        built(store, "of another loop")
        return built(store, "a")

    assert reused(store, stage)


def test_a_stage_that_made_a_damaged_artifact_again_is_not_reused(store: ArtifactStore) -> None:
    store.path(built(store, "a").weights).write_text("damaged")
    assert not reused(store, lambda: built(store, "a"))


def test_a_line_of_the_journal_that_was_cut_off_is_passed_over(store: ArtifactStore) -> None:
    built(store, "a")
    with (store.root / "builds.jsonl").open("a") as journal:
        journal.write('{"kind": "mod\n')
    assert reused(store, lambda: built(store, "a"))
    assert not store.built_since(1)(built(store, "a").weights)


def test_a_loop_under_the_model_name_of_another_use_case_ends_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigurationError("belongs to use case flights")

    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pipeline, "claim_model_name", refuse)
    monkeypatch.setattr(Stages, "run", lambda _, name, *__: pytest.fail(f"{name} ran before"))
    config = read_pipeline_config(Settings.from_environment({}).feature_repo)
    with pytest.raises(ConfigurationError, match="belongs to"):
        pipeline.run_loop(config)
    assert not (tmp_path / "home").exists()
