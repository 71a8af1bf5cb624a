from pathlib import Path

import pytest

from flows.config import PipelineConfig
from tasks.contracts.training import EpochMetrics, ModelCompression, TrainedModel
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import ArtifactStore
from tasks.training.compression.config import CompressionConfig
from tasks.training.compression.plan import StudentPlan, chosen, plan_student
from tasks.training.config import LaunchConfig, TrainingConfig
from tests.support.data.builders import compression, dataset
from tests.support.registry.builders import trained_model
from tests.support.training.parents import LARGE, large_network, parent
from tests.support.training.searches import use_case

PRESENT = TrainingConfig(
    launch=LaunchConfig(ranks=3), hidden_sizes=(999,), seed=77, progress_timeout_s=11
)


def planned(
    folder: Path, recorded: dict[str, object] | None = None, **asked: object
) -> StudentPlan:
    store = ArtifactStore(folder)
    config = CompressionConfig.model_validate(asked)
    return plan_student(parent(store, **(recorded or {})), config, PRESENT, store)


def test_a_student_is_trained_as_its_parent_was_and_carried_out_as_the_use_case_says(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, method="distillation", hidden_sizes=[8], max_epochs=5)
    assert plan.config.hidden_sizes == (8,)
    assert plan.config.max_epochs == 5
    assert plan.config.seed == LARGE.seed
    assert plan.config.global_batch_size == LARGE.global_batch_size
    assert plan.config.learning_rate == LARGE.learning_rate
    assert plan.config.launch == PRESENT.launch
    assert plan.config.progress_timeout_s == PRESENT.progress_timeout_s
    assert plan.initial is None
    assert plan.compression.is_distilled


def test_pruning_begins_with_what_is_left_and_trains_to_the_end(tmp_path: Path) -> None:
    plan = planned(tmp_path, pruned_share=0.5, max_embedding_size=2, num_bins=3, dropout=0.1)
    assert plan.initial is not None
    assert plan.config.hidden_sizes == (16, 8)
    assert plan.config.learning_rate == LARGE.learning_rate
    assert plan.config.patience == plan.config.max_epochs
    config = plan.config
    assert (config.max_embedding_size, config.num_bins, config.dropout) == (2, 3, 0.1)
    made = plan.compression
    assert (made.parent_sizes, made.is_distilled) == ((32, 16), False)
    assert made.parent_parameters == sum(p.numel() for p in large_network().parameters())


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"method": "distillation", "hidden_sizes": [64, 32]}, "expected a smaller one"),
        ({"method": "distillation", "hidden_sizes": [32, 16]}, "expected a smaller one"),
        (
            {"method": "distillation", "hidden_sizes": [8], "max_embedding_size": 500},
            "max_embedding_size 500, num_bins 6, the large one has hidden_sizes 32-16, ",
        ),
        ({"num_bins": 12}, "expected a smaller one for method 'pruning'"),
        ({"pruned_share": 0.99}, "expected one to be left"),
    ],
)
def test_a_student_that_is_no_smaller_is_refused(
    tmp_path: Path, asked: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        planned(tmp_path, **asked)


def test_a_parent_of_settings_that_nobody_reads_any_more_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="version 7 was trained with settings that"):
        planned(tmp_path, {"gears": 5})


def with_quality(model: TrainedModel, best: float) -> TrainedModel:
    epochs = [
        EpochMetrics.model_validate(
            {**e.model_dump(), "validation_auc": best - 0.1 * (e.epoch != 2)}
        )
        for e in model.epochs
    ]
    return model.model_copy(update={"epochs": tuple(epochs)})


@pytest.mark.parametrize(
    ("distilled", "control", "is_distilled"),
    [(0.80, 0.79, True), (0.79, 0.80, False), (0.8, 0.8, False)],
)
def test_the_better_by_the_validation_rows_is_offered_and_the_simpler_of_equals(
    store: ArtifactStore, distilled: float, control: float, is_distilled: bool
) -> None:
    rows = dataset(store)
    one, other = trained_model(store, rows, seed=1), trained_model(store, rows, seed=2)
    made = compression(parent(store).program.version)
    model, reason = chosen(made, with_quality(one, distilled), with_quality(other, control))
    assert model.program == (one if is_distilled else other).program
    assert model.compression.is_distilled is is_distilled
    assert f"{distilled:.4f}" in reason
    assert ("the distilled network is offered" in reason) is is_distilled
    assert not chosen(made, None, other)[0].compression.is_distilled


def test_what_versions_before_the_rename_hold_is_read(tmp_path: Path) -> None:
    plan = planned(tmp_path, pruned_share=0.5)
    stored = plan.compression.model_dump(mode="json")
    stored["is_taught"] = stored.pop("is_distilled")
    assert ModelCompression.model_validate(stored) == plan.compression
    asked = {**use_case().model_dump(mode="json"), "shrinking": {"pruned_share": 0.5}}
    asked.pop("compression")
    assert PipelineConfig.model_validate(asked).compression.pruned_share == 0.5


@pytest.mark.parametrize("model", ["gradient-boosting", "average", "my_package:build"])
def test_only_a_network_of_ours_is_made_smaller(tmp_path: Path, model: str) -> None:
    with pytest.raises(ConfigurationError, match=f"is '{model}', and only a network of ours"):
        planned(tmp_path, {"model": model})
