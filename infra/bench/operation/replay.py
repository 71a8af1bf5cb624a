"""A replay from a finished loop, once more, and what it says of the controller.

All policies are walked from nothing: the state folder is copied first.
"""

import math
import shutil
from datetime import timedelta

import pandas as pd
from sklearn.metrics import r2_score, roc_auc_score

from flows.config import read_pipeline_config
from infra.bench.figures import Figure, Measured, at_least, at_most, reported
from infra.bench.loop import GIB, run_measured
from infra.bench.parts import Bench
from infra.bench.running import own_environment, small_repository
from tasks.contracts.data import R2_NAME
from tasks.contracts.replay import PolicyName, ReplayResult
from tasks.kernel.settings import ArtifactStore, Settings

FAULTS = {
    "flights": "celsius@07-10,freeze@08-01:36h,timezone@10-05,labels-flipped@09-01:0.02,"
    "category-split@11-01,station-missing@02-10:7d",
    "traffic": "celsius@2017-07-10,freeze@2017-08-01:36h,timezone@2017-10-05",
}
PERMUTED = {"flights": 4, "traffic": 8}
"""Histories in a random order: three years of days, and eleven; each one of the flights takes six
minutes of one core."""
SMALL_CLOCK = {"min_train_days": 5, "validation_days": 5, "test_days": 7, "drift_days": 7}
SMALL_WORDS = ["--start", "2013-01-23", "--held-out-from", "2013-01-27"]
WHOLE_FEED = {"celsius", "scale", "freeze", "timezone", "station-missing"}
"""Kinds of faults that move a column by several standard deviations, or break a whole feed."""
DAY = timedelta(days=1)
MADE = ("replay*", "faults", "models", "baseline-models", "evaluations", "recalibrated")
"""What an earlier replay of that state has left; with it a training would be charged nothing."""


def figures(bench: Bench, of: Settings | None = None) -> Measured:
    """Time and memory, the controller beside the schedules, and what became of the faults.

    Args:
        of: a finished loop; by default the one that measurements read.
    """
    settings = of or bench.settings
    home, log = bench.folder / "home", bench.folder / "log.txt"
    shutil.copytree(settings.home, home, symlinks=True, ignore=shutil.ignore_patterns(*MADE))
    words = ["-m", "falaj", "--home", str(home), "replay"]
    environment = own_environment() | {"FALAJ_FEATURE_REPO": str(settings.feature_repo)}
    name = read_pipeline_config(settings.feature_repo).name
    if bench.small:
        environment["FALAJ_FEATURE_REPO"] = str(small_repository(bench.folder, clock=SMALL_CLOCK))
        words += SMALL_WORDS
    first, again = (run_measured(words, log, environment) for _ in range(2))
    if not bench.small:  # all else is kept, so the times above are those of the policies
        words += ["--permuted", str(PERMUTED.get(name, 1))]
        words += ["--inject", FAULTS[name]] if name in FAULTS else []
        run_measured(words, log, environment)
    own = Settings.from_environment(environment | {"FALAJ_HOME": str(home)})
    file = own.reports / "replay" / name / "replay.json"
    result = ReplayResult.model_validate_json(file.read_text())
    made = f"{len(result.policies)} policies, {len(result.models)} models, {result.history}"
    return [
        at_most(f"{name}: replay, minutes", first.wall_s / 60, 45, made),
        at_most(f"{name}: replay again, seconds", again.wall_s, 60, "all of it kept"),
        at_most(f"{name}: peak memory GiB", first.peak_bytes / GIB, 4, "whole process tree"),
        *_policies(result),
        *_faults(result),
        _recomputed(result, own.store),
    ]


def _policies(result: ReplayResult) -> list[Figure]:
    """The controller against each schedule on the days that judge."""
    name, ours = result.use_case, result.of("controller").held_out
    monthly = result.of("monthly").held_out
    trainings = f"{ours.num_trainings} of {monthly.num_trainings}, held out"
    found = [
        at_least(f"{name}: controller minus monthly", ours.to_monthly.value, -0.001,
                 f"{result.quality_name} {ours.to_monthly:.4f}"),
        at_most(f"{name}: trainings to monthly's",
                ours.num_trainings / max(monthly.num_trainings, 1), 1 / 3, trainings),
    ]  # fmt: skip
    schedules: tuple[PolicyName, ...] = ("weekly", "monthly", "on-drift-alarm")
    own = ours.gain_per_cpu_hour
    for policy in schedules:
        part = result.of(policy).held_out
        gain, theirs = part.to_controller, part.gain_per_cpu_hour
        seen = f"{part.num_trainings} trainings, {part.use.cpu_s / 3600:.3f} CPU h"
        found.append(reported(f"{name}: {policy} minus controller", gain.value, f"{gain:.4f}"))
        if own and theirs:
            label = f"{name}: gain per CPU hour to that of {policy}"
            ratio = own.value / theirs.value if theirs.value > 0 else math.nan
            found.append(at_least(label, ratio, 1, f"{own:.3f} to {theirs:.3f}; {seen}"))
    return found


def _faults(result: ReplayResult) -> list[Figure]:
    """Delays of faults that nobody could overlook, and answers that were wrong."""
    name, alarms = result.use_case, result.false_alarms
    clear = [fault for fault in result.faults if fault.kind in WHOLE_FEED]
    noticed = [f.noticed is not None and f.noticed - f.start <= DAY for f in clear]
    verdicts = ", ".join(f"{fault.fault} {fault.verdict}" for fault in result.faults)
    wrong = sum(fault.verdict == "wrong" for fault in result.faults)
    seen = f"{alarms.refused} weeks refused, {alarms.alerts} days with an alert"
    found = [reported(f"{name}: data faults seen where there are none", alarms.data_faults, seen)]
    if years := result.permuted:
        label = f"{name}: retrainings in ten permuted years"
        seen = f"{years.retrainings} in {years.num_years:.1f} years; on-drift-alarm "
        seen += str(years.drift_alarm_retrainings)
        found.append(at_most(label, 10 * years.retrainings / years.num_years, 1, seen))
    if result.faults:
        share = sum(noticed) / len(clear)
        label = f"{name}: clear faults noticed within a day, share"
        found.append(at_least(label, share, 1, verdicts))
        found.append(at_most(f"{name}: faults that were trained on", wrong, 0, verdicts))
    return found


def _recomputed(result: ReplayResult, store: ArtifactStore) -> Figure:
    """The qualities once more, from the stored scores."""
    rows, held_out = pd.read_parquet(store.path(result.scores)), result.held_out
    times = rows[result.event_time]
    rows = rows[(times >= held_out.start) & (times < held_out.end) & rows[result.label].notna()]
    measure = r2_score if result.quality_name == R2_NAME else roc_auc_score
    apart = [
        abs(measure(rows[result.label], rows[one.policy]) - one.held_out.quality.value)
        for one in result.policies
    ]
    label = f"{result.use_case}: quality to that of the stored scores, largest difference"
    return at_most(label, max(apart), 1e-6, f"{len(rows):,} rows, {len(apart)} policies")
