"""Prefect tasks of the registry: register, fetch, attach, promote.

None is cached by content. What they change is outside the artifact store, where a stored result
could not vouch for it: an alias can be moved back or a version deleted between two runs. Each is
idempotent instead: it looks whether the registry already is as it should be, which takes
milliseconds once MLflow is imported, and does only what is lacking.
"""

import time
from datetime import UTC, datetime
from uuid import UUID

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import INPUTS, RUN_ID
from prefect.client.orchestration import get_client
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.contracts import release
from tasks.contracts.base import ModelVersionRef, TimeWindow
from tasks.contracts.conversion import ImportedProgram
from tasks.contracts.data import DataSplits, ValidatedDataset
from tasks.contracts.evaluation import EvaluationReport
from tasks.contracts.training import CandidateModel, StartingPoint, StudyRecord, TrialRecord
from tasks.governance.identity import CONTROLLER, creator_id, current_subject, owner, read_sign_in
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.registry import approval, candidate, model_folder, programs, promotion
from tasks.registry.approval import Answer, Question
from tasks.registry.config import PromotionConfig, RegistryConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import Registry
from tasks.registry.promotion import OpenQuestion

EARLIEST_S = 60.0
"""Seconds before the end of a question for which whoever comes to close it waits."""

_POLICY = uncached(600, kept=True)


def _location() -> RegistryLocation:
    return RegistryLocation.of(Settings.from_environment())


def _installation() -> tuple[RegistryLocation, ArtifactStore]:
    return _location(), Settings.from_environment().store


def _trainer() -> str:
    """Who had this run trained: the person who started it, else the controller."""
    home = Settings.from_environment().home
    if read_sign_in(home) is None:
        return owner().name
    with get_client(sync_client=True) as client:
        root = client.read_flow_run(UUID(str(flow_run.root_flow_run_id)))
    if root.deployment_id is None:  # a command runs it, in its own process
        return current_subject(home).name
    by = root.created_by
    name = (by and by.display_value) or ""
    return name if by and str(by.id) == creator_id(name) else CONTROLLER


@task(name="claim-model-name", task_run_name="claim-{config.model_name}", **_POLICY)
def claim_model_name(
    use_case: str | None, service: str | None, config: RegistryConfig, reserve: bool = True
) -> None:
    """See that no other use case registers under the model name, and note whose it is.

    Safe to retry: the same owner is noted again.

    Args:
        use_case: who wants to register under it; None for an import.
        service: feature service that it trains on; None for an import.
        config: the name, and whose it takes over.
        reserve: False to look only.

    Raises:
        ConfigurationError: it belongs to another use case. Not retried.
    """
    whose = candidate.IMPORTS if use_case is None else use_case
    candidate.claim_model_name(whose, service, config, _location(), reserve=reserve)


@task(name="find-incumbent", task_run_name="find-incumbent-{config.model_name}", **_POLICY)
def find_incumbent(
    trained: CandidateModel, config: RegistryConfig
) -> release.RegisteredProgram | None:
    """The champion that the trained model is to be compared with; None where there is none.

    Safe to retry: it only reads, and copies the program into the store under its digest.
    """
    return programs.find_incumbent(trained, config, *_installation())


@task(name="find-start", task_run_name="find-start-{config.model_name}", **_POLICY)
def find_start(
    dataset: ValidatedDataset,
    splits: DataSplits,
    training: dict[str, object],
    config: RegistryConfig,
) -> StartingPoint | None:
    """The champion's weights for a training to begin with; None where there is no champion.

    Safe to retry: it only reads, and copies the checkpoint into the store under its digest.

    Raises:
        RegistryError: the champion's files are missing or damaged. Not retried.
    """
    start = programs.find_start(dataset, splits, training, config.model_name, *_installation())
    if start is None:
        get_run_logger().info("%s has no earlier champion to begin with", config.model_name)
    return start


@task(name="find-calibration-source", task_run_name="find-source-{config.model_name}", **_POLICY)
def find_calibration_source(
    fit: TimeWindow, holdout: TimeWindow, config: RegistryConfig
) -> release.CalibrationSource:
    """The champion, with all that another map of its scores needs.

    Safe to retry: it only reads, and copies files into the store under their digest.

    Raises:
        RegistryError: there is no champion, or its files are missing or damaged. Not retried.
    """
    return programs.find_calibration_source(fit, holdout, config.model_name, *_installation())


@task(name="find-compression-parent", task_run_name="find-parent-{config.model_name}", **_POLICY)
def find_compression_parent(
    version: int | None, config: RegistryConfig
) -> release.CompressionParent:
    """The version that a smaller network is to come from; None for the champion.

    Of a champion that is a smaller network already, the version that it was made from.

    Safe to retry: it only reads, and copies files into the store under their digest.

    Raises:
        RegistryError: there is none, or its files are missing or damaged. Not retried.
    """
    return programs.find_compression_parent(version, config.model_name, *_installation())


@task(name="find-champion", task_run_name="find-champion-{config.model_name}", **_POLICY)
def find_champion(config: RegistryConfig) -> release.RegisteredProgram | None:
    """The champion's program, copied into the artifact store and checked by digest.

    Before there is a champion (the first candidate may be refused) the candidate is taken; None
    before there is one either.

    Safe to retry: it only reads, and copies the program into the store under its digest.

    Raises:
        RegistryError: its files are missing or damaged. Not retried.
    """
    champion = programs.find_champion(config.model_name, *_installation())
    if champion is None:
        get_run_logger().info("%s has no version yet: train a first one", config.model_name)
    return champion


@task(name="fetch-version", task_run_name="fetch-{version.name}-{version.version}", **_POLICY)
def fetch_version(version: ModelVersionRef) -> release.RegisteredProgram:
    """The program of a registered version, copied into the artifact store and checked by digest.

    Safe to retry: it only reads, and copies the program into the store under its digest.

    Raises:
        RegistryError: the version is gone, or its files are missing or damaged. Not retried.
    """
    return programs.fetch_version(version, *_installation())


@task(name="find-trained-version", task_run_name="find-version-{config.model_name}", **_POLICY)
def find_trained(config: RegistryConfig, number: int | None) -> release.TrainedVersion:
    """A version that was trained here, with the splits of its rows; None for the champion.

    Safe to retry: it only reads.

    Raises:
        RegistryError: there is no such version, it is damaged, or was trained elsewhere. Not
            retried.
    """
    return programs.find_trained(config.model_name, number, _location())


@task(name="find-filed-version", task_run_name="find-version-{config.model_name}", **_POLICY)
def find_filed(config: RegistryConfig, number: int) -> release.FiledVersion:
    """A registered version with the judgement and the variants that a promotion needs.

    Safe to retry: it only reads.

    Raises:
        RegistryError: it is not there, or lacks one of them. Not retried.
    """
    return programs.find_filed(config.model_name, number, _location())


@task(name="register-candidate", task_run_name="register-{config.model_name}", **_POLICY)
def register_candidate(
    trained: CandidateModel,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    config: RegistryConfig,
    code_commit: str,
    draw: candidate.Draw = lambda _: {},
) -> ModelVersionRef:
    """Record the run and register its model as the candidate.

    Safe to retry: the same program on the same snapshot is one version, which comes into being
    after its files; a run that was cut off is discarded by the next call.
    """
    location, store = _installation()
    ref = candidate.register_candidate(
        trained, evaluation, dataset, config, location, store, code_commit, _trainer(), draw
    )
    folder = Registry(location).run_folder(ref.run_id)
    create_markdown_artifact(
        approval.announcement(ref, folder, Settings.from_environment().home),
        key="registered-model",
        description=f"{ref.name} version {ref.version} is the candidate",
    )
    return ref


@task(name="register-import", task_run_name="register-{config.model_name}", **_POLICY)
def register_import(
    imported: ImportedProgram, config: RegistryConfig, code_commit: str
) -> ModelVersionRef:
    """Register a program that was trained elsewhere.

    Safe to retry: the same program of the same origin is one version, which comes into being after
    its files; a run that was cut off is discarded by the next call.
    """
    return candidate.register_import(imported, config, *_installation(), code_commit, _trainer())


# No timeout: trials may run in threads, where Prefect cannot keep one.
_IN_THREADS = {**_POLICY, "timeout_seconds": None}


@task(name="record-trials", task_run_name="record-trials-{study}", **_IN_THREADS)
def record_trials(study: str, trials: tuple[TrialRecord, ...], config: RegistryConfig) -> int:
    """Write trials of a search as runs of MLflow; returns how many were lacking.

    Safe to retry: a trial has one run, and one that was cut off is written anew.
    """
    return candidate.record_trials(study, trials, config, _location())


@task(name="end-study", task_run_name="end-{record.study}", **_POLICY)
def end_study(record: StudyRecord, config: RegistryConfig) -> None:
    """Write the trials of a search that are lacking, and end the study's own run.

    Safe to retry: what is there already is left, and the numbers are the same.
    """
    candidate.end_study(record, config, _location())


@task(
    name="attach-variants",
    task_run_name="attach-variants-{version.name}-{version.version}",
    **_POLICY,
)
def attach_variants(
    version: ModelVersionRef,
    variants: tuple[release.ModelVariant, ...],
    raw_files: dict[str, str] | None = None,
) -> ModelVersionRef:
    """File the kept variants with the version, list all with the reasons, and write its bill.

    Safe to retry: folders are named by digest and the list that names them is replaced last.
    """
    return model_folder.attach_variants(version, variants, *_installation(), raw_files)


@task(
    name="promote-candidate",
    task_run_name="promote-{candidate.name}-{candidate.version}",
    **_POLICY,
)
def promote_candidate(
    candidate: ModelVersionRef,
    evaluation: EvaluationReport,
    dataset: ValidatedDataset,
    variants: tuple[release.ModelVariant, ...],
    config: PromotionConfig,
    only_judge: bool = False,
) -> release.PromotionDecision:
    """Ask all gates and move the alias `champion` where all are open; a refusal is a result too.

    With `only_judge` nothing is moved, asked or recorded.

    Safe to retry: the decision is kept by digest and moving the alias is the last step.
    """
    asked = Question(
        candidate=candidate,
        evaluation=evaluation,
        dataset=dataset,
        variants=variants,
        config=config,
    )
    decide = promotion.judge_only if only_judge else promotion.promote
    decision = decide(asked, *_installation(), now=datetime.now(UTC))
    show_gates(decision)
    return decision


# A run that waited for a person starts from the top: what it did before is not done again.
_ONCE_A_RUN = {**_POLICY, "cache_policy": RUN_ID + INPUTS}


@task(name="open-question", task_run_name="ask-about-{model}-{version}", **_ONCE_A_RUN)
def open_promotion_question(model: str, version: int, again: bool) -> OpenQuestion:
    """The question about a candidate, with the gates as they are at this moment.

    Safe to retry: a question is put once, and looking at it changes nothing.

    Args:
        model: registered model.
        version: its version.
        again: ask again about a version that was rejected, or whose time was over.

    Raises:
        RegistryError: nobody was asked, or the question cannot be read. Not retried.
    """
    now = datetime.now(UTC)
    opened = promotion.open_question(model, version, *_installation(), now, again=again)
    create_markdown_artifact(
        opened.markdown,
        key="approval-question",
        description=f"What is asked about {model} version {version}",
    )
    return opened


@task(name="answer-question", task_run_name="answer-{model}-{version}", **_ONCE_A_RUN)
def answer_promotion_question(
    model: str, version: int, digest: str, answer: Answer | None
) -> release.PromotionDecision:
    """Record what a person said about a candidate, and decide through the same gates.

    Safe to retry: the first answer stays, and the alias moves last.

    Args:
        model: registered model.
        version: its version.
        digest: question that the person saw.
        answer: what was said; None where the question was settled elsewhere.

    Raises:
        RegistryError: by now another question was put, or nothing was settled. Not retried.
    """
    now = datetime.now(UTC)
    decision = promotion.settle(model, version, digest, answer, *_installation(), now)
    show_gates(decision)
    return decision


@task(name="close-question", task_run_name="close-{model}-{version}", **_ONCE_A_RUN)
def close_promotion_question(model: str, version: int, digest: str) -> bool:
    """Reject a candidate that nobody answered for in time; True where that is so.

    Prefect rounds to seconds and starts a scheduled run up to half a second early: what is left of
    the time is waited for.

    Safe to retry: a question is closed once.
    """
    location = _location()
    left_s = approval.seconds_left(model, version, location, datetime.now(UTC), digest)
    if left_s is not None and left_s <= EARLIEST_S:
        time.sleep(left_s)
    return approval.close_question(model, version, location, datetime.now(UTC), digest)


def show_gates(decision: release.PromotionDecision) -> None:
    """The gates of a decision as a table in the Prefect UI."""
    create_table_artifact(
        key="promotion-gates",
        table=[
            {
                "gate": gate.name,
                "state": "open" if gate.passed else "CLOSED",
                "evidence": gate.evidence,
            }
            for gate in decision.gates
        ],
        description=approval.outcome(decision),
    )


@task(name="find-champion-state", task_run_name="find-champion-state-{model_name}", **_POLICY)
def find_champion_state(model_name: str) -> release.ChampionState | None:
    """The champion, since when, and its predecessor; None without one.

    Safe to retry: it only reads.
    """
    return promotion.find_champion_state(model_name, _location(), datetime.now(UTC))


@task(name="roll-back", task_run_name="roll-back-{model_name}-{replaced}", **_POLICY)
def roll_back(model_name: str, replaced: int, reason: str, order_id: str) -> release.Rollback:
    """Point the alias `champion` at the champion before version `replaced` again.

    Safe to retry: one order is carried out once, and moving the alias is the last step.

    Raises:
        RegistryError: another version is the champion, or the one before cannot serve. Not retried.
    """
    now = datetime.now(UTC)
    return promotion.roll_back(model_name, replaced, reason, order_id, _location(), now)
