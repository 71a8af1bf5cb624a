"""The state of a release, what servers and gateway are to do for it, and what was decided."""

from typing import Literal

from tasks.contracts.rollout import Action, ReleaseState, ReleaseSummary, Shares
from tasks.kernel.values import Frozen
from tasks.release.config import ALPHA, SPLIT_ALPHA, ReleaseConfig, StepConfig

OPEN, RELEASED, ROLLED_BACK, SUPERSEDED = "open", "released", "rolled_back", "superseded"
BY_ITSELF = "release flow"
"""Actor of what no person asked for."""
BY_HAND = "by_hand"
"""Rule of what a person asked for."""
ByHand = Literal["promote", "hold", "resume", "roll_back"]


class Wanted(Frozen):
    """What the servers and the gateway are to do for one model."""

    stable: str
    candidate: str | None = None
    shadow: str | None = None
    shares: Shares = Shares()


class Decision(Frozen):
    """What is to be done, and why."""

    action: Action
    rule: str
    """Word for the rule that decided."""
    reason: str


class Release(ReleaseState):
    """One release as the ledger has it."""

    generation: int
    """Counts what was decided; a mover learns by it that something else was decided since."""
    moved: int
    """Generation whose traffic was set."""
    config: ReleaseConfig

    @property
    def is_open(self) -> bool:
        """True until it ends."""
        return self.state == OPEN

    @property
    def is_moved(self) -> bool:
        """True where the traffic was set as decided last."""
        return self.moved == self.generation

    @property
    def steps(self) -> tuple[StepConfig, ...]:
        """Steps that this release takes: only the last one where nothing splits requests."""
        return self.config.steps if self.can_split else self.config.steps[-1:]

    @property
    def current(self) -> StepConfig:
        """The step it is in."""
        return self.steps[self.step]

    @property
    def wanted(self) -> Wanted:
        """What servers and gateway are to do for the release as it stands.

        The candidate stays loaded in its track from the first step on, so that a step is a change
        at the gateway alone. Where nothing splits requests, it takes the track `stable`.
        """
        if self.state == RELEASED or (self.is_open and not self.can_split):
            return Wanted(stable=self.candidate)
        if not self.is_open:
            return Wanted(stable=self.stable)
        step = self.current
        return Wanted(
            stable=self.stable,
            candidate=self.candidate,
            shadow=self.candidate if step.mirror_percent else None,
            shares=Shares(
                candidate=step.candidate_percent,
                mirror=step.mirror_percent,
                sticky=self.config.sticky,
            ),
        )

    @property
    def summary(self) -> ReleaseSummary:
        """What its page shows."""
        return ReleaseSummary(
            **{name: getattr(self, name) for name in ReleaseState.model_fields},
            step_names=tuple(step.name for step in self.steps),
            is_moved=self.is_moved,
            is_ranking=self.config.ranks,
            chance=sum(ALPHA),
            split_alpha=SPLIT_ALPHA,
        )
