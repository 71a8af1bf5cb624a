"""Walk a history day by day under one policy: check, decide, train, ask the gates, promote.

The controller's walk uses the parts of the daily system themselves: the drift check, the rule, the
record with incidents, cool-down and budget, the gates, recalibration and roll back. Only the clock
is virtual, and conversion, registry and serving are left out: they change no score.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field
from threadpoolctl import threadpool_limits

from flows.replay.history import History, ReplayModel, code_of, keep_scores, measured, priced
from flows.replay.models import Candidate, recalibrate, retrain
from flows.stages import held_back
from tasks.contracts.base import Contract, TimeWindow
from tasks.contracts.drift import DayErrors, DriftReport, DriftResult
from tasks.contracts.evaluation import Comparison
from tasks.contracts.hardware import read_classes
from tasks.contracts.release import ChampionState
from tasks.contracts.replay import PolicyName, ReplayedAct
from tasks.contracts.telemetry import ResourceUse
from tasks.control.retraining import decision, incidents
from tasks.control.retraining.decision import Action, Cause, asks_for_former, gather
from tasks.control.retraining.incidents import Here, settle, start_claimed
from tasks.control.retraining.ledger import Ledger
from tasks.control.retraining.records import Order, Outcome, RunEnd, StartedAction
from tasks.conversion import calibrator
from tasks.costs.ledger import CostLedger, Entry
from tasks.evaluation import judge, recalibration
from tasks.evaluation.drift import compare
from tasks.evaluation.drift.slow import join_days
from tasks.evaluation.metrics import AGAINST, measure_rows
from tasks.evaluation.scoring import SCORE
from tasks.kernel.errors import DataContractError, TrainingError, WindowError
from tasks.kernel.files import scratch_folder
from tasks.kernel.process import report_progress
from tasks.kernel.settings import StagedFolder, code_digest, content_key
from tasks.registry import gates
from tasks.training.models import making

ALARM_PSI, ALARM_SHARE = 0.2, 0.5
"""`on-drift-alarm`: at least half of the features with a PSI above 0.2, the usual bound of a
significant shift (Siddiqi, "Credit Risk Scorecards", 2006), on the day of a weekly check."""
MONDAY = 0
Making = Literal["retrain", "recalibrate"]
NOT_TRAINED = (DataContractError, TrainingError, WindowError)
"""What fails a training for good: the run would have failed, and the champion stays."""


class Reigning(Contract):
    """A model that came into service at a moment."""

    since: datetime
    model: ReplayModel


class Spending(Contract):
    """What was taken at a moment."""

    at: datetime
    use: ResourceUse
    training: bool = False


class Walk(Contract):
    """Everything that one policy did."""

    policy: PolicyName
    reigns: tuple[Reigning, ...]
    acts: tuple[ReplayedAct, ...]
    made: tuple[Candidate, ...]
    spent: tuple[Spending, ...]
    results: dict[str, str] = Field(
        default={}, description="Day to the result of its drift check, and its first sentence."
    )

    def faults(self) -> list[str]:
        """What the drift check took for a fault of the data, a sentence a day."""
        mark = f"{DriftResult.DATA_FAULT.value}: "
        return [r.removeprefix(mark) for r in self.results.values() if r.startswith(mark)]

    def candidate_at(self, moment: datetime, first: Candidate) -> Candidate:
        """Who serves at a moment, with all that was known when it was made."""
        served = [reign.model for reign in self.reigns if reign.since <= moment]
        known = {candidate.model: candidate for candidate in self.made}
        return known.get(served[-1], first) if served else first


@dataclass
class Service:
    """Who serves now and who did before, and what has happened."""

    history: History
    champion: Candidate
    promoted_at: datetime | None
    previous: Candidate | None = None
    reigns: list[Reigning] = field(default_factory=list)
    acts: list[ReplayedAct] = field(default_factory=list)
    made: list[Candidate] = field(default_factory=list)
    spent: list[Spending] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)

    def begin(self, moment: datetime) -> None:
        """Put the first champion into service."""
        if self.reigns and self.reigns[-1].since == moment:
            self.reigns.pop()
        self.reigns.append(Reigning(since=moment, model=self.champion.model))

    def retrain(self, moment: datetime, reason: str) -> None:
        """Train, and promote what passes the gates."""
        self._try("retrain", partial(retrain, self.history, moment, self.champion), moment, reason)

    def recalibrate(self, window: TimeWindow, moment: datetime, reason: str) -> None:
        """Map the champion's scores anew, and promote what passes the gates."""
        made = partial(recalibrate, self.history, window, moment, self.champion)
        self._try("recalibrate", made, moment, reason)

    def roll_back(self, moment: datetime, reason: str) -> None:
        """Let the one before serve again."""
        assert self.previous is not None
        self.champion, self.previous, self.promoted_at = self.previous, None, None
        self.begin(moment)
        number = self.champion.model.number
        act = ReplayedAct(at=moment, action="roll_back", reason=reason, model=number, promoted=True)
        self.acts.append(act)

    def _try(
        self, action: Making, make: Callable[[], Candidate | str], moment: datetime, reason: str
    ) -> None:
        with measured() as used:
            try:
                found = make()
            except NOT_TRAINED as exc:
                found = f"failed: {exc}"
        if isinstance(found, str):
            self.spent.append(Spending(at=moment, use=used[0], training=action == "retrain"))
            reason = f"{reason}; not done: {found}"
            self.acts.append(ReplayedAct(at=moment, action=action, reason=reason))
            return
        self.made.append(found)
        self.spent.append(Spending(at=moment, use=found.use, training=action == "retrain"))
        if not found.closed:
            self.previous, self.champion, self.promoted_at = self.champion, found, moment
            self.begin(moment)
        gates = {"promoted": not found.closed, "closed": found.closed}
        act = {"at": moment, "action": action, "reason": reason, "model": found.model.number}
        self.acts.append(ReplayedAct.model_validate(act | gates))

    def state(self) -> ChampionState:
        """The champion as the registry would describe it."""
        history, previous = self.history, self.previous
        return ChampionState(
            version=self.champion.model.version(history),
            promoted_at=self.promoted_at,
            previous=previous.model.version(history) if previous else None,
            previous_trouble=None,
        )


def walk(history: History, policy: PolicyName, days: Sequence[datetime], first: Candidate) -> Walk:
    """Walk the days under one policy; kept by its content, so a second walk is read.

    Args:
        history: rows, clock and configuration.
        policy: any but `oracle`, which is chosen from the others' models.
        days: moments of the daily checks, rising.
        first: champion before the first day.

    Raises:
        FalajError: a part failed in a way that would not fail a real run alone.
    """
    ends = days[0], days[-1]
    rules = code_of(compare, judge, recalibration, decision, incidents, gates, calibrator, making)
    prices = [kind.prices for kind in read_classes().values()]
    key = content_key(
        code_digest(__file__), rules, history.identity, policy, ends, first.model, prices
    )

    def build(folder: StagedFolder) -> Walk:
        service = Service(history, first, first.model.made)
        service.begin(days[0])
        with scratch_folder("falaj-replay-") as scratch:
            step = _steps(policy, service, scratch)
            for number, moment in enumerate(days):
                report_progress("replay", number, len(days), f"{policy}: {moment:%Y-%m-%d}")
                step(moment)
        return Walk(
            policy=policy,
            reigns=tuple(service.reigns),
            acts=tuple(service.acts),
            made=tuple(service.made),
            spent=tuple(service.spent),
            results=service.results,
        )

    return history.store.build_once("replayed-walks", key, Walk, build)


def _steps(policy: PolicyName, service: Service, scratch: Path) -> Callable[[datetime], None]:
    history = service.history

    def is_due(moment: datetime) -> bool:  # not the day of the first champion, made by then
        return moment > service.champion.model.made

    def monday(moment: datetime) -> None:
        if is_due(moment) and history.local(moment).weekday() == MONDAY:
            service.retrain(moment, "each Monday")

    def first_of_month(moment: datetime) -> None:
        if is_due(moment) and history.local(moment).day == 1:
            service.retrain(moment, "first day of the month")

    def alarm(moment: datetime) -> None:
        if history.local(moment).weekday() == MONDAY and (reason := _alarm(service, moment)):
            service.retrain(moment, reason)

    def nothing(moment: datetime) -> None:
        pass

    steps = {"never": nothing, "weekly": monday, "monthly": first_of_month, "on-drift-alarm": alarm}
    return steps.get(policy) or Controller(service, scratch).day


def _alarm(service: Service, moment: datetime) -> str | None:
    """Why a plain monitor of feature drift would retrain now; None where it would not."""
    history = service.history
    window = history.config.clock.newest_days(moment)
    try:
        kept = seen_features(history, service.champion.model.splits.train, window)
    except NOT_TRAINED:  # too few days with rows
        return None
    service.spent.append(Spending(at=moment, use=kept.use))
    shifted = sum(feature.psi > ALARM_PSI for feature in kept.seen.features)
    if shifted < ALARM_SHARE * len(kept.seen.features):
        return None
    return f"{shifted} of {len(kept.seen.features)} features with a PSI above {ALARM_PSI}"


class KeptFeatures(Contract):
    """What the features of two windows showed, and what it took to see."""

    seen: compare.SeenFeatures
    use: ResourceUse


def seen_features(history: History, reference: TimeWindow, current: TimeWindow) -> KeptFeatures:
    """Compare the features of two windows, once for all models and policies."""
    config, store, dataset = history.config.drift, history.store, history.dataset
    sha = dataset.snapshot.data.sha256
    key = content_key(code_of(compare), sha, reference, current, config, history.with_unit)

    def build(folder: StagedFolder) -> KeptFeatures:
        with measured() as used, threadpool_limits(1):
            windows = compare.open_windows(dataset, reference, dataset, current, config, store)
            seen = compare.compare_features(history.columns, windows, config, history.with_unit)
        return KeptFeatures(seen=seen, use=used[0])

    return store.build_once("replayed-features", key, KeptFeatures, build)


class KeptCheck(Contract):
    """One drift check, and what it took."""

    report: DriftReport
    use: ResourceUse


def part_of(use: ResourceUse, share: float) -> ResourceUse:
    """A share of what something took: each check scores its own rows, whoever scored them all."""
    return ResourceUse(seconds=use.seconds * share, cpu_s=use.cpu_s * share)


def check_drift(
    history: History, model: ReplayModel, window: TimeWindow, earlier: tuple[DayErrors, ...] = ()
) -> KeptCheck:
    """The drift check of one day, as the flow `drift-check` does it."""
    sha = history.dataset.snapshot.data.sha256
    config, units = history.config, history.with_unit
    key = content_key(
        code_of(compare, judge), sha, model, window, earlier, config.drift, config.evaluation, units
    )

    def build(folder: StagedFolder) -> KeptCheck:
        dataset, train = history.dataset, model.splits.train
        kept, scores = seen_features(history, train, window), keep_scores(history, model)
        share = len(history.rows[history.part(window)]) / scores.num_rows
        with measured() as used, threadpool_limits(1):
            before = history.judged(model, model.splits.validation)
            sides = dataset, train, dataset, window, before, history.judged(model, window)
            settings = config.drift, history.store, units, earlier, kept.seen
            report = compare.compare_windows(*sides, *settings)
        return KeptCheck(report=report, use=used[0] + kept.use + part_of(scores.use, share))

    return history.store.build_once("replayed-checks", key, KeptCheck, build)


class Controller:
    """The controller with its own record, on the virtual clock.

    Args:
        service: what it keeps good.
        folder: where its record is while it walks.
    """

    def __init__(self, service: Service, folder: Path) -> None:
        self._service, self._history = service, service.history
        self._now = service.reigns[0].since
        self._days: dict[int, tuple[DayErrors, ...]] = {}  # as `Ledger.scored_days` gives them
        url = f"sqlite:///{folder}/ledger.db"
        self._ledger, self._costs = Ledger(url, lambda: self._now), CostLedger(url)

    def day(self, moment: datetime) -> None:
        """Check, decide, and carry out."""
        self._now = moment
        service, history, config = self._service, self._history, self._history.config
        window = config.clock.newest_days(moment)
        number = service.champion.model.number
        try:
            kept = check_drift(history, service.champion.model, window, self._days.get(number, ()))
        except NOT_TRAINED as exc:  # too few days or rows: that run would have failed
            service.results[f"{moment:%Y-%m-%d}"] = f"failed: {exc}"
            return
        self._days[number] = join_days(self._days.get(number, ()), kept.report.days)
        service.spent.append(Spending(at=moment, use=kept.use))
        report, state = kept.report, service.state()
        said = report.evidence[0] if report.evidence else ""
        service.results[f"{moment:%Y-%m-%d}"] = f"{report.result.value}: {said}"
        former = None
        if state.previous and asks_for_former(report, state, config.retraining, moment):
            former = self._former_minus_present(window)
        evidence = gather(report, state.version, state, former, moment, held_back(history.config))
        model, policy = config.registry.model_name, config.retraining
        self._ledger.store_result(model, config.name, evidence, policy)
        here = Here(state.version.version, recalibrates=not history.columns.classes)
        answer = settle(self._ledger, model, config.name, "replay", here)
        for made in answer.decisions:
            if made.outcome is Outcome.ALERTS and made.cause is Cause.FEED:
                service.acts.append(ReplayedAct(at=moment, action="alert", reason=made.reason))
            elif made.outcome in (Outcome.COOL_DOWN, Outcome.BUDGET):
                service.acts.append(ReplayedAct(at=moment, action="wait", reason=made.reason))
        orders = sorted(answer.orders, key=lambda order: order.action is not Action.ROLL_BACK)
        start_claimed(self._ledger, orders, self._carry_out)

    def _former_minus_present(self, window: TimeWindow) -> Comparison | None:
        """How the champion before would have done in the window; None with too few labels."""
        history, service = self._history, self._service
        assert service.previous is not None
        plain = history.columns.model_copy(update={"baseline": None})
        now = history.judged(service.champion.model, window)
        then = history.scored(service.previous.model, window)
        names = list(history.columns.score_columns(SCORE))
        if now.metrics is None or not np.isfinite(then[names].to_numpy()).all():
            return None
        present = history.scored(service.champion.model, window)
        return measure_rows(then, plain, SCORE).minus(measure_rows(present, plain, SCORE), AGAINST)

    def _carry_out(self, order: Order) -> StartedAction:
        """Do it at once: a training takes minutes, and the next day is a day away."""
        service, before = self._service, len(self._service.spent)
        started = StartedAction(kind="in_process", run_id=order.incident_id, place="replay")
        self._ledger.mark_started(order.incident_id, started)
        if order.action is Action.RETRAIN:
            service.retrain(self._now, order.reason)
        elif order.action is Action.RECALIBRATE:
            service.recalibrate(order.evidence.window, self._now, order.reason)
        elif order.version == service.champion.model.number:
            service.roll_back(self._now, order.reason)
        use = sum((spending.use for spending in service.spent[before:]), ResourceUse())
        run, names = order.incident_id, {"use_case": order.use_case, "model": order.model}
        entry = Entry(
            run_id=run, root_id=run, flow=order.action, owner="replay", hardware_class="", **names,
            state="completed", started=self._now, ended=self._now, use=priced(use),
        )  # fmt: skip
        self._costs.write([(entry, None)])
        self._ledger.mark_ended(run, RunEnd(state="completed", seconds=use.seconds))
        return started
