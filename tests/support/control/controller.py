"""The controller of one model on a database of its own, and a platform that keeps its runs."""

from collections.abc import Callable
from datetime import datetime

from tasks.control.config import RetrainingPolicy
from tasks.control.retraining import records
from tasks.control.retraining.decision import Action, Evidence
from tasks.control.retraining.incidents import Here, answer, note_ends, settle, start_claimed
from tasks.control.retraining.ledger import Ledger
from tests.support.control.builders import FREE, MODEL, USE_CASE


class Runs:
    """A platform that keeps one run for each key, as Prefect does."""

    def __init__(self, ledger: Ledger | None = None, name: str = "") -> None:
        self.by_key: dict[str, str] = {}
        self.num_calls = 0
        self.ended: records.RunEnd | None = None
        self.ledger, self.name = ledger, name

    def start(self, order: records.Order) -> records.StartedAction | None:
        if self.ledger and not self.ledger.reserve(order.incident_id, self.name):
            return None
        self.num_calls += 1
        run_id = self.by_key.setdefault(order.incident_id, f"run-{len(self.by_key)}")
        return records.StartedAction(kind="deployment", run_id=run_id, place="pipeline/pipeline")

    def end(self, order: records.Order, started: records.StartedAction) -> records.RunEnd | None:
        return self.ended


class Controller:
    """The controller of one model, on a database of its own."""

    def __init__(
        self, url: str, policy: RetrainingPolicy = FREE, clock: Callable[[], datetime] | None = None
    ) -> None:
        self.ledger, self.policy, self.runs = Ledger(url, clock), policy, Runs()
        self.champion: int | None = 1
        self.recalibrates = True
        self.asked_about: int | None = None

    def judge(self, seen: Evidence) -> str:
        return self.ledger.store_result(MODEL, USE_CASE, seen, self.policy).result_id

    def ask(self, result_id: str, mode: records.Mode = "act") -> list[records.Outcome]:
        return self._carry_out(answer(self.ledger, result_id, "a test", self.here(mode)))

    def here(self, mode: records.Mode = "act") -> Here:
        return Here(self.champion, self.recalibrates, self.asked_about, mode)

    def sweep(self) -> list[records.Outcome]:
        note_ends(self.ledger, self.runs.end)
        made = []
        for model, use_case in self.ledger.unsettled():
            made += self._carry_out(settle(self.ledger, model, use_case, "the sweep", self.here()))
        left = self.ledger.claims(records.ClaimState.CLAIMED)
        start_claimed(self.ledger, [claim.order for claim in left], self.runs.start)
        return made

    def see(self, seen: Evidence) -> list[records.Outcome]:
        return self.ask(self.judge(seen))

    def end_runs(self) -> None:
        self.runs.ended = records.RunEnd(state="completed", seconds=30.0)
        note_ends(self.ledger, self.runs.end)
        self.runs.ended = None

    def latest(self) -> tuple[Action, Action | None]:
        made = self.ledger.decisions(limit=1)[0]
        return made.action, made.carried_out_as

    def reason(self) -> str:
        return self.ledger.decisions(limit=1)[0].reason

    def _carry_out(self, answered: records.Answer) -> list[records.Outcome]:
        start_claimed(self.ledger, answered.orders, self.runs.start)
        return [made.outcome for made in answered.decisions]
