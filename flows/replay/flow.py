"""Replay: what each policy would have gained and cost on the history that a use case holds."""

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta

from prefect import flow, task

from flows.candidate import validated_rows
from flows.config import PipelineConfig, suites_of
from flows.drift_check import columns_with_unit
from flows.replay import outcome
from flows.replay.config import ReplayConfig
from flows.replay.faults import false_alarms, faulty_world, sightings
from flows.replay.history import History, code_of, opened, parts
from flows.replay.models import Candidate, retrain
from flows.replay.permuted import permuted
from flows.replay.tuning import tune, with_field
from flows.replay.walk import Walk, walk
from flows.stages import FOUND
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import AUC_NAME, R2_NAME
from tasks.contracts.replay import (
    FalseAlarms,
    FaultResult,
    PermutedYears,
    PolicyName,
    Proposal,
    ReplayedAct,
    ReplayResult,
)
from tasks.evaluation.drift import compare
from tasks.evaluation.monitoring import monitor
from tasks.features import injection
from tasks.features.injection import Fault, parse_faults
from tasks.kernel.retry_policy import uncached
from tasks.kernel.settings import StagedFolder, code_digest, content_key
from tasks.reporting.task import publish_replay
from tasks.validation import runner

TIMEOUT_S = 86_400
POLICIES_OF_DRIFT: tuple[PolicyName, ...] = ("controller", "on-drift-alarm")


@flow(name="replay", flow_run_name="replay-{config.name}", **FOUND)
def replay_flow(config: PipelineConfig, replay: ReplayConfig) -> ReplayResult:
    """Walk the history under each policy, compare what they served, and say which to run.

    Cut off and run again it goes on: every training, check and walk is kept by its content.

    Args:
        config: The use case, whose whole window was refreshed.
        replay: Policies, parts of the history, faults.
    """
    zone = config.clock.time_zone
    faults = parse_faults(replay.faults, config.window, zone) if replay.faults else ()
    history = opened(config, validated_rows(config), columns_with_unit(config))
    tuned_on, held_out = parts(history, replay)
    for fault in faults:  # one that cannot be is refused before hours of walks
        faulty_world(fault, history.config, history.settings)
    days = history.days(tuned_on.start, held_out.end)
    first = train_first(history, days[0])
    walks: dict[PolicyName, Walk] = {
        policy: walk_policy(history, policy, days, first)
        for policy in replay.policies
        if policy != "oracle"
    }
    controller = walks["controller"]
    alarms = count_false_alarms(history, controller, days)
    result = compare_policies(history, replay, first, walks, alarms, days)
    injected = [inject_fault(history, fault, first, controller) for fault in faults]
    found: dict[str, object] = {"faults": tuple(injected)}
    if replay.permuted:
        found["permuted"] = walk_permuted(history, replay, days)
    if replay.tune:
        found["proposal"] = propose_bounds(history, first, controller, replay)
    result = result.model_copy(update=found)
    publish_replay(result)
    return result


@task(name="train-first", task_run_name="first-champion-{moment}", **uncached(TIMEOUT_S))
def train_first(history: History, moment: datetime) -> Candidate:
    """The champion before the first day, trained as the loop would have.

    Safe to retry: a training resumes from its checkpoints, and is kept by its content.

    Raises:
        FalajError: it cannot be trained. Not retried, unless a rank was lost.
    """
    return retrain(history, moment, None)


@task(name="walk-policy", task_run_name="walk-{policy}", **uncached(TIMEOUT_S))
def walk_policy(
    history: History, policy: PolicyName, days: list[datetime], first: Candidate
) -> Walk:
    """Walk all days under one policy.

    Safe to retry: what was trained and checked is kept by its content.

    Raises:
        TransientError: a rank was lost, or another process trains the same. Retried.
        FalajError: a part failed for good. Not retried.
    """
    return walk(history, policy, days, first)


@task(name="count-false-alarms", **uncached(TIMEOUT_S))
def count_false_alarms(history: History, controller: Walk, days: list[datetime]) -> FalseAlarms:
    """What the checks of the daily system raise where nothing is broken.

    Safe to retry: what was judged is kept by its content.
    """
    # From a whole hour on, as refreshes are: half an hour lacks the rows of its other half.
    window = TimeWindow(start=days[0].replace(minute=0), end=history.config.window.end)
    return false_alarms(history.config, history.settings, window, controller.faults())


@task(name="compare-policies", **uncached(TIMEOUT_S))
def compare_policies(
    history: History,
    replay: ReplayConfig,
    first: Candidate,
    walks: dict[PolicyName, Walk],
    alarms: FalseAlarms,
    days: list[datetime],
) -> ReplayResult:
    """Judge what each policy served, on the days that may choose bounds and on those that judge.

    Safe to retry: it reads what is kept.
    """
    tuned_on, held_out = parts(history, replay)
    walks = {**walks, "oracle": outcome.oracle(history, list(walks.values()), days)}
    tuned = outcome.qualities(history, walks, tuned_on)
    judged = outcome.qualities(history, walks, held_out)
    name = R2_NAME if history.columns.task == "regression" else AUC_NAME
    chosen, sentence = outcome.recommended(judged, name)
    whole = TimeWindow(start=tuned_on.start, end=held_out.end)
    return ReplayResult(
        use_case=history.config.name,
        question=history.config.question,
        quality_name=name,
        history=whole,
        tuned_on=tuned_on,
        held_out=held_out,
        seed=replay.seed,
        policies=tuple(
            outcome.policy_result(history, walks[p], tuned[p], judged[p]) for p in walks
        ),
        models=outcome.replayed_models(first, list(walks.values())),
        false_alarms=alarms,
        recommended=chosen,
        sentence=sentence,
        scores=outcome.keep_scores(history, walks, whole),
        event_time=history.columns.event_time,
        label=history.columns.label,
    )


@task(name="inject-fault", task_run_name="inject-{fault}", **uncached(TIMEOUT_S))
def inject_fault(history: History, fault: Fault, first: Candidate, controller: Walk) -> FaultResult:
    """Break the history, see who notices when, and what the controller does about it.

    Rows that their validation refuses never become features, so then nothing else can happen.
    Safe to retry: what was built and checked is kept by its content.
    """
    config, settings = history.config, history.settings
    rules = code_of(injection, compare, monitor, runner)
    suites = str(suites_of(config, settings.feature_repo))
    key = content_key(
        code_digest(__file__), rules, history.identity, str(fault), suites, first, controller
    )

    def build(folder: StagedFolder) -> FaultResult:
        return _injected(history, fault, first, controller)

    return history.store.build_once("replayed-faults", key, FaultResult, build)


def _injected(history: History, fault: Fault, first: Candidate, controller: Walk) -> FaultResult:
    config, settings = history.config, history.settings
    world = faulty_world(fault, config, settings)
    begun = controller.candidate_at(fault.start, first)
    known = config.model_copy(update={"splits": begun.model.splits})
    seen = list(sightings(world, known, settings))
    refused = any(s.by == "validation of rows" and s.at - fault.start <= outcome.DAY for s in seen)
    # So long is it in the window of the drift check.
    end = (fault.end or fault.start) + timedelta(days=config.clock.drift_days)
    walked = history.days(controller.reigns[0].since, config.window.end)
    days = [day for day in walked if fault.start <= day < end]
    asked = bool(world.dataset and days) and walked[0] <= fault.start and not refused
    acts: list[ReplayedAct] = []
    if asked and world.dataset:
        broken = replace(history, dataset=world.dataset, in_memory={})
        usual = walk(history, "controller", days, begun).acts
        acts = outcome.more_acts(walk(broken, "controller", days, begun).acts, usual)
        for act in [act for act in acts if act.action != "wait"][:1]:
            seen = [s for s in seen if s.by != "drift check" or s.at <= act.at]
            if all(s.by != "drift check" for s in seen):
                seen.append(world.sighting(act.at, "drift check", act.reason))
    facts = {"described": world.described, "size": world.size, "sightings": seen, "asked": asked}
    what = {"fault": str(fault), "kind": fault.kind, "start": fault.start, "end": fault.end}
    return FaultResult.model_validate(what | facts | outcome.answered(seen, acts, fault.start))


@task(name="walk-permuted", **uncached(TIMEOUT_S))
def walk_permuted(history: History, replay: ReplayConfig, days: list[datetime]) -> PermutedYears:
    """Walk histories in which nothing drifts, and count what was done there.

    No retraining there is for more days to learn from, which needs no drift.
    Safe to retry: what was trained and checked is kept by its content.
    """
    acts: Counter[tuple[PolicyName, str]] = Counter()
    config = with_field(history.config, "retraining.retrain_at_growth", None)
    history = replace(history, config=config)
    for number in range(replay.permuted):
        mixed = permuted(history, (replay.seed, number))
        first = retrain(mixed, days[0], None)
        for policy in POLICIES_OF_DRIFT:
            acts.update((policy, act.action) for act in walk(mixed, policy, days, first).acts)
    return PermutedYears(
        num_years=replay.permuted * len(days) / 365.25,
        retrainings=acts["controller", "retrain"],
        recalibrations=acts["controller", "recalibrate"],
        drift_alarm_retrainings=acts["on-drift-alarm", "retrain"],
    )


@task(name="propose-bounds", **uncached(TIMEOUT_S))
def propose_bounds(history: History, first: Candidate, own: Walk, replay: ReplayConfig) -> Proposal:
    """Try other bounds of the controller on the early days, and judge the best on the later ones.

    Safe to retry: what was trained and checked is kept by its content.
    """

    def walked(changed: History, window: TimeWindow) -> Walk:
        return walk(changed, "controller", changed.days(window.start, window.end), first)

    return tune(history, own, *parts(history, replay), walked)
