"""The models of a replay: trained or mapped anew, judged, and asked through the real gates.

Each is kept by its content, so policies that train on the same days share a training, and each is
charged for it as if it had trained alone.
"""

from datetime import datetime

from flows.config import PipelineConfig
from flows.replay.history import History, ReplayModel, code_of, measured
from flows.stages import roll
from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.evaluation import BaselineModel, EvaluationReport
from tasks.contracts.release import CalibrationSource
from tasks.contracts.telemetry import ResourceUse
from tasks.contracts.training import RecalibratedModel, TrainedModel
from tasks.conversion.calibrator import map_program
from tasks.evaluation import judge as judging
from tasks.evaluation.baseline_model import score_baseline_model
from tasks.evaluation.config import calibration_splits, split_window
from tasks.evaluation.judge import judge_model
from tasks.evaluation.recalibration import fit_scored, why_no_gain
from tasks.kernel.errors import WindowError
from tasks.kernel.settings import StagedFolder, content_key
from tasks.registry.gates import Evidence, judge
from tasks.registry.model_folder import VersionRecord, manifest_of
from tasks.training.config import EXECUTION_FIELDS
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.models import making
from tasks.training.models.making import make_model
from tasks.training.models.source import source_digest

NOT_REPLAYED = frozenset({"whole-artifacts", "hardware"})
"""Gates about files that a replay does not make: nothing is converted or registered."""


class Trained(Contract):
    """A training of one moment, with the baseline model of its days, and what both took."""

    model: TrainedModel
    baseline: BaselineModel
    use: ResourceUse


class Candidate(Contract):
    """A model that asks to serve: how it was judged, what refuses it, and what it took."""

    model: ReplayModel
    made_from: TrainedModel | RecalibratedModel
    evaluation: EvaluationReport
    closed: tuple[str, ...]
    use: ResourceUse


class _Judged(Contract):
    evaluation: EvaluationReport
    use: ResourceUse


def retrain(history: History, moment: datetime, incumbent: Candidate | None) -> Candidate:
    """Train on the newest days, as the loop does, and ask all gates.

    Raises:
        WindowError: too few days to train on.
        FalajError: as `make_model` and `judge_model`.
    """
    config = roll(history.config, moment)
    trained = _trained(history, config)
    made, use = trained.model, trained.use
    return _asked(history, config, moment, 1, made, trained.baseline, incumbent, use)


def recalibrate(
    history: History, window: TimeWindow, moment: datetime, source: Candidate
) -> Candidate | str:
    """Map the champion's scores anew, as the flow `recalibration` does; or why that is not done."""
    config, store = history.config, history.store
    try:
        fit_window, holdout = split_window(window, config.recalibration)
        splits = calibration_splits(source.model.splits.train, fit_window, holdout)
    except WindowError as exc:
        return str(exc)
    scored = history.judged(source.model, fit_window)
    outcome = fit_scored(scored, history.columns, config.recalibration, store)
    if outcome.fit is None:
        return outcome.refusal or "no map was fitted"
    made_from = source.made_from
    with measured() as used:
        origin = CalibrationSource(
            program=source.model.registered(history),
            checkpoint=made_from.checkpoint,
            splits=source.model.splits,
            training_config=made_from.config,
            best_epoch=made_from.best_epoch,
            calibration=getattr(made_from, "calibration", None),
        )
        made = map_program(origin, outcome.fit, history.dataset, splits, store)
        baseline = score_baseline_model(history.dataset, splits, config.baseline_model, store)
    config = config.with_splits(splits)
    found = _asked(history, config, moment, 2, made, baseline, source, used[0])
    return why_no_gain(found.evaluation, source.model.number) or found


def _trained(history: History, config: PipelineConfig) -> Trained:
    """Train, or find it trained; one build keeps model and use together."""
    dataset, store, settings = history.dataset, history.store, history.settings
    own = config.training.own_model
    key = content_key(
        code_of(making), source_digest(own, settings.feature_repo) if own else "",
        dataset.snapshot.data.sha256, config.splits,
        config.training.model_dump(mode="json", exclude=set(EXECUTION_FIELDS)),
        config.baseline_model,
    )  # fmt: skip

    def build(folder: StagedFolder) -> Trained:
        project = settings.feature_repo
        request = TrainingRequest(dataset, config.splits, config.training, project=project)
        with measured() as used:
            model = make_model(request, store, settings.home / "training")
            baseline = score_baseline_model(dataset, config.splits, config.baseline_model, store)
        return Trained(model=model, baseline=baseline, use=used[0] + _ranks(model))

    return store.build_once("replayed-trainings", key, Trained, build)


def _ranks(model: TrainedModel) -> ResourceUse:
    """What the ranks took, which are other processes."""
    seen = model.telemetry
    if seen is None:
        return ResourceUse()
    gpus = [device for device in seen.devices if device.energy_j is not None]
    return ResourceUse(
        cpu_s=sum(rank.cpu_s for rank in seen.ranks),
        gpu_s=seen.seconds * len(gpus),
        joules=seen.energy.joules,
        estimated=seen.energy.estimated,
    )


def _asked(
    history: History,
    config: PipelineConfig,
    moment: datetime,
    kind: int,
    made: TrainedModel | RecalibratedModel,
    baseline: BaselineModel,
    incumbent: Candidate | None,
    use: ResourceUse,
) -> Candidate:
    model = ReplayModel(
        number=2 * (moment - history.config.window.start).days + kind,
        made=moment,
        program=made.program,
        columns=made.columns,
        splits=made.splits,
    )
    against = incumbent.model.registered(history) if incumbent else None
    key = content_key(
        code_of(judging), made.program.sha256, made.splits, against, config.evaluation
    )

    def build(folder: StagedFolder) -> _Judged:
        parts = made, history.dataset, against, baseline, config.evaluation
        with measured() as used:
            report = judge_model(*parts, history.store)
        return _Judged(evaluation=report, use=used[0])

    judged = history.store.build_once("replayed-judgements", key, _Judged, build)
    version = model.version(history)
    manifest = manifest_of(made, history.dataset.snapshot, version.name, "replay", {})
    evidence = Evidence(
        candidate=version,
        record=VersionRecord(version, manifest, None, ()),
        evaluation=judged.evaluation,
        dataset=history.dataset,
        variants=(),
        lost=(),
        champion=against.version if against else None,
        now=moment,
    )
    gates = judge(evidence, config.promotion)
    return Candidate(
        model=model,
        made_from=made,
        evaluation=judged.evaluation,
        closed=tuple(g.name for g in gates if not g.passed and g.name not in NOT_REPLAYED),
        use=use + judged.use,
    )
