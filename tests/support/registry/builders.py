"""Small values of the other rooms, as the registry gets them; any bytes serve as a program."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import pytest

from tasks.contracts.base import ModelVersionRef
from tasks.contracts.data import ValidatedDataset
from tasks.contracts.evaluation import CurvePoint, EvaluationReport, PairedComparison, SliceMetrics
from tasks.contracts.release import ModelVariant, PromotionDecision
from tasks.contracts.training import CandidateModel, TrainedModel
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder, content_key
from tasks.registry.approval import Question
from tasks.registry.candidate import register_candidate
from tasks.registry.config import PromotionConfig, RegistryConfig
from tasks.registry.connection import RegistryLocation, load_mlflow, prepare_database
from tasks.registry.mlflow_registry import CHAMPION, RegisteredVersion, Registry
from tasks.registry.model_folder import attach_variants
from tasks.registry.promotion import promote
from tests.support.data import builders
from tests.support.data.builders import metric, metric_set

CONFIG = RegistryConfig(model_name="flight-delay", experiment="training")
DEFAULTS, FEBRUARY = PromotionConfig(), datetime(2014, 2, 1, tzinfo=UTC)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database; its schema migrations run once."""
    home = tmp_path_factory.mktemp("mlflow")
    prepare_database(RegistryLocation(f"sqlite:///{home / 'mlflow.db'}", home / "files"))
    return home / "mlflow.db"


def comparison(against: str, difference: float, spread: float = 0.001) -> PairedComparison:
    return PairedComparison(
        against=against,
        auc_difference=metric(difference, spread),
        brier_difference=metric(-difference / 10, spread),
    )


def trained_model(store: ArtifactStore, dataset: ValidatedDataset, seed: int = 0) -> TrainedModel:
    key = content_key("model", seed, dataset)

    def build(folder: StagedFolder) -> TrainedModel:
        (folder.path / "program.pt2").write_bytes(b"program %d " % seed * 500)
        (folder.path / "checkpoint.pt").write_bytes(b"checkpoint %d " % seed * 500)
        (folder.path / "ranks.log").write_text("rank 0: done\n")
        return builders.trained_model(
            folder.artifact("program.pt2"),
            dataset.snapshot.data.sha256,
            checkpoint=folder.artifact("checkpoint.pt"),
            log=folder.artifact("ranks.log"),
            columns=dataset.snapshot.columns,
            config={"num_ranks": 2, "optimizer": {"name": "adamw", "betas": [0.9, 0.99]}},
            epochs=tuple(builders.epoch(n, 0.70 + 0.01 * n) for n in range(4)),
            best_epoch=2,
            num_ranks=2,
        )

    return store.build_once("models", key, TrainedModel, build)


def evaluation(
    store: ArtifactStore,
    trained: TrainedModel,
    auc: float = 0.75,
    against: tuple[PairedComparison, ...] = (),
) -> EvaluationReport:
    key = content_key("evaluation", trained, auc, list(against))

    def build(folder: StagedFolder) -> EvaluationReport:
        (folder.path / "predictions.parquet").write_bytes(b"predictions" + key.encode())
        steps = [i / 20 for i in range(21)]
        return EvaluationReport(
            model_sha256=trained.program.sha256,
            snapshot_sha256=trained.snapshot_sha256,
            window=trained.splits.test,
            overall=metric_set(auc, 0.01),
            slices=(
                SliceMetrics(column="carrier", value="AA", metrics=metric_set(auc)),
                SliceMetrics(column="carrier", value="EV", metrics=metric_set(auc - 0.05)),
            ),
            skipped_slices=("carrier=OO: 32 rows",),
            baseline_model=metric_set(0.749),
            baseline_model_name="gradient boosting",
            comparisons=(comparison("yardstick", auc - 0.749), *against),
            predictions=folder.artifact("predictions.parquet"),
            roc=tuple(CurvePoint(x=x, y=x**0.4) for x in steps),
            precision_recall=tuple(CurvePoint(x=x, y=1 - 0.8 * x) for x in steps),
            calibration=tuple(
                CurvePoint(x=x * 0.8, y=x * 0.78, weight=20 * (1 - x)) for x in steps
            ),
        )

    return store.build_once("evaluations", key, EvaluationReport, build)


def variants(
    store: ArtifactStore, program_sha256: str, content: str = "graph"
) -> tuple[ModelVariant, ...]:
    """One kept ONNX variant with two files and one dropped INT8 variant."""
    key = content_key("variants", program_sha256, content)

    def build(folder: StagedFolder) -> ModelVariant:
        files = folder.path / "onnx-fp32"
        (files / "weights").mkdir(parents=True)
        (files / "model.onnx").write_text(f"{content} of {program_sha256}")
        (files / "weights" / "0.bin").write_bytes(b"\0" * 2048)
        return builders.variant(
            program_sha256,
            folder.artifact("onnx-fp32"),
            auc_change=metric(0.0, 1e-6),
            reason="three times as fast as PyTorch eager",
            settings={"opset": "18"},
        )

    kept = store.build_once("variants", key, ModelVariant, build)
    dropped = kept.model_copy(
        update={
            "name": "openvino-int8",
            "precision": "int8",
            "files": None,
            "accepted": False,
            "reason": "loses 0.004 AUC, bound 0.002",
        }
    )
    return kept, dropped


def draw(evaluation: EvaluationReport) -> dict[str, str]:
    """One picture, which takes no time."""
    return {"quality.svg": '<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100"/>'}


@dataclass(frozen=True)
class World:
    """One installation with a validated dataset."""

    location: RegistryLocation
    store: ArtifactStore
    dataset: ValidatedDataset

    @classmethod
    def at(cls, home: Path) -> World:
        settings = Settings(home, home / "repo")
        location, store = RegistryLocation.of(settings), settings.store
        return cls(location, store, builders.dataset(store, builders.frame(300)))

    @property
    def home(self) -> Path:
        return self.store.root.parent

    @property
    def database(self) -> Path | None:
        return self.location.database_path

    def with_database_of(self, template: Path) -> Self:
        """Save the second that the schema migrations take."""
        self.database.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(template, self.database)
        return self

    @property
    def registry(self) -> Registry:
        return Registry(self.location)

    @property
    def mlflow(self) -> Any:
        """MLflow's own client."""
        uri = self.location.uri
        return load_mlflow().MlflowClient(tracking_uri=uri, registry_uri=uri)

    def alias(self, name: str) -> int | None:
        found = self.registry.by_alias(CONFIG.model_name, name)
        return None if found is None else found.number

    @property
    def champion(self) -> int | None:
        return self.alias(CHAMPION)

    def version(self, number: int = 1) -> RegisteredVersion:
        return self.registry.version(CONFIG.model_name, number)

    def model(self, seed: int = 0) -> TrainedModel:
        return trained_model(self.store, self.dataset, seed)

    def register(
        self, seed: int = 0, auc: float = 0.75, against: tuple[PairedComparison, ...] = ()
    ) -> tuple[ModelVersionRef, EvaluationReport]:
        report = evaluation(self.store, self.model(seed), auc, against=against)
        return self.register_judged(self.model(seed), report), report

    def register_judged(
        self,
        model: CandidateModel,
        report: EvaluationReport,
        dataset: ValidatedDataset | None = None,
        commit: str = "abc1234",
    ) -> ModelVersionRef:
        judged = (model, report, dataset or self.dataset, CONFIG)
        return register_candidate(*judged, self.location, self.store, commit, draw=draw)

    def promote(
        self,
        ref: ModelVersionRef,
        report: EvaluationReport,
        made: tuple[ModelVariant, ...],
        config: PromotionConfig = DEFAULTS,
        now: datetime = FEBRUARY,
    ) -> PromotionDecision:
        evidence = {"evaluation": report, "dataset": self.dataset, "variants": made}
        asked = Question(candidate=ref, config=config, **evidence)
        return promote(asked, self.location, self.store, now)

    def promoted(
        self, seed: int = 0, against: tuple[PairedComparison, ...] = (), *how: Any
    ) -> PromotionDecision:
        """Register, attach and try to promote the model of one seed."""
        ref, report = self.register(seed, against=against)
        return self.promote(ref, report, self.attach(ref), *how)

    def attach(self, ref: ModelVersionRef, content: str = "graph") -> tuple[ModelVariant, ...]:
        made = variants(self.store, ref.program_sha256, content)
        attach_variants(ref, made, self.location, self.store)
        return made


@pytest.fixture
def world(tmp_path: Path, migrated: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """An installation in a folder whose name must be quoted in an address, quick at drawing.

    It is that of all commands of this process.
    """
    for name in ("FALAJ_DATABASE_URL", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    world = World.at(tmp_path / "a home#1").with_database_of(migrated)
    monkeypatch.setenv("FALAJ_HOME", str(world.home))
    return world
