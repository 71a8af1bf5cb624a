"""Run measurements one after the other, each in a process of its own, and keep what came of it.

The default use case on one month with a small model: a loop of a minute, for `--small`.
"""

import json
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from infra.bench.figures import Figure, LeftOut
from infra.bench.loop import FIRST_RUN, run_measured
from infra.bench.parts import OUTCOME_FILE, Bench, Measurement, Outcome
from infra.bench.processes import run_python
from infra.bench.results import Result, checked_out, this_host
from tasks.kernel.files import read_yaml
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT, Settings

SMALL: dict[str, Any] = read_yaml(Path(__file__).with_name("small.yaml"), "small.yaml")
"""What differs from `use_case.yaml`."""
QUICK: dict[str, Any] = {
    "conversion": {"formats": ["onnx-fp32", "openvino-fp32"], "measurement": "quick"}
}
"""What a loop can do without that is only measured on."""


def small_repository(folder: Path, **more: Any) -> Path:
    """Copy the default use case into a folder and make it small; returns its feature repository.

    Args:
        more: sections that are to differ too.
    """
    repo = folder / "feature_repo"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT_ROOT / DEFAULT_FEATURE_REPO, repo, ignore=ignored)
    file = repo / "use_case.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | SMALL | QUICK | more))
    return repo


LONGEST_REASON = 600


class MeasurementError(Exception):
    """A measurement ended without figures; the text says why."""


@dataclass
class LoopState:
    """The state folder of a finished loop, which is run when one is first needed.

    Attributes:
        folder: for the loop that is run here.
        given: a state folder to read instead.
    """

    folder: Path
    given: Path | None
    small: bool
    _failure: str | None = field(default=None, init=False)

    def environment(self, measurement: Measurement) -> dict[str, str]:
        """Variables that name the state folder, and the feature repository of a small loop.

        Raises:
            MeasurementError: the loop failed, now or for an earlier measurement.
        """
        if not measurement.reads_loop:
            return {}
        # The loop's own figures need to know what the first run took.
        if self.given and (measurement.part != "loop" or (self.given.parent / FIRST_RUN).exists()):
            return {"FALAJ_HOME": str(self.given)}
        home = self.folder / "home"
        told = {"FALAJ_HOME": str(home)}
        if self.small:
            told["FALAJ_FEATURE_REPO"] = str(self.folder / "feature_repo")
        if self._failure is None and not (self.folder / FIRST_RUN).exists():
            self._run(home, told)
        if self._failure:
            raise MeasurementError(self._failure)
        return told

    def _run(self, home: Path, told: dict[str, str]) -> None:
        self.folder.mkdir()
        if self.small:
            small_repository(self.folder)
        say("a whole loop on a new state folder")
        arguments = ["-m", "falaj", "--home", str(home), "run"]
        try:
            cost = run_measured(arguments, self.folder / "log.txt", own_environment() | told)
            (self.folder / FIRST_RUN).write_text(json.dumps(cost))
        except RuntimeError as exc:
            self._failure = f"the loop that is measured on: {exc}"


@dataclass(frozen=True)
class Runner:
    """Measures.

    Attributes:
        scratch: for all that is written beside results.
    """

    scratch: Path
    loop: LoopState
    small: bool
    commit: str = field(default_factory=checked_out)

    def measure(self, measurement: Measurement) -> Result:
        """Run one measurement to its end, or to its failure."""
        failure: str | None = None
        measured: list[Figure | LeftOut] = []
        date, before, started = datetime.now(UTC), os.getloadavg()[0], time.monotonic()
        try:
            environment = self.loop.environment(measurement)
            date, before, started = datetime.now(UTC), os.getloadavg()[0], time.monotonic()
            measured = self._measured(measurement, environment)
        except MeasurementError as exc:
            failure = self._anonymous(str(exc))
        return Result(
            commit=self.commit,
            date=date,
            host=this_host(),
            load=(before, os.getloadavg()[0]),
            seconds=round(time.monotonic() - started, 1),
            small=self.small,
            measured=tuple(measured),
            failure=failure,
        )

    def _measured(
        self, measurement: Measurement, environment: dict[str, str]
    ) -> list[Figure | LeftOut]:
        with TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True) as scratch:
            file, log = Path(scratch) / OUTCOME_FILE, Path(scratch) / "log.txt"
            size = "small" if self.small else "usual"
            program = ["-m", "infra.bench.parts", measurement.title, scratch, size]
            failure = ""
            try:
                run_python(program, log, own_environment() | environment, measurement.limit_s)
            except RuntimeError as exc:
                failure = str(exc)
                for line in log.read_text(errors="replace").strip().splitlines()[-40:]:
                    say(f"  | {line}")
            outcome = Outcome.validate_json(file.read_bytes()) if file.exists() else []
        if isinstance(outcome, str):  # its own words
            raise MeasurementError(outcome)
        if failure or not outcome:
            raise MeasurementError(failure or "it measured nothing")
        return outcome

    def _anonymous(self, reason: str) -> str:
        """A reason without folders of this machine and its name."""
        for private, public in (
            (str(self.scratch), "SCRATCH"),
            (str(PROJECT_ROOT), "."),
            (str(Path.home()), "~"),
            (platform.node(), "HOST"),
        ):
            if len(private) > 1:
                reason = reason.replace(private, public)
        reason = " ".join(reason.split())
        if len(reason) > LONGEST_REASON:  # what a program said last says most
            reason = f"{reason[: LONGEST_REASON // 3]} ... {reason[-LONGEST_REASON // 2 :]}"
        return reason


def traffic_loop(folder: Path) -> Settings:
    """Run the traffic's loop in a folder; where it is."""
    repo = PROJECT_ROOT / "feature_repo" / "traffic"
    own = {"FALAJ_HOME": str(folder / "traffic"), "FALAJ_FEATURE_REPO": str(repo)}
    run_python(["-m", "falaj", "run"], folder / "loop.txt", own_environment() | own)
    return Settings.from_environment(own)


def own_environment() -> dict[str, str]:
    """The variables of this process, but for those that name somebody's installation.

    A bench writes into ledgers and registries: they have to be its own. A feature repository is
    only read.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FALAJ_", "PREFECT_", "MLFLOW_"))
        or name == "FALAJ_FEATURE_REPO"
        or name.endswith("_PYTHON")  # of another server's environment
    }


def loop_environment(bench: Bench) -> dict[str, str]:
    """Variables of loops on folders of their own, of the small use case where that is asked for."""
    small = {"FALAJ_FEATURE_REPO": str(small_repository(bench.folder))} if bench.small else {}
    return own_environment() | small


def say(text: str) -> None:
    """A line of progress."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
