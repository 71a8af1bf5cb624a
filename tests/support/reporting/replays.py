"""A replayed year as a value: seeded, with policies that gain and cost what real ones might."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from tasks.contracts.base import Artifact, TimeWindow
from tasks.contracts.data import DataSplits
from tasks.contracts.evaluation import Metric
from tasks.contracts.replay import ReplayResult

START, JULY, END = (datetime(2013, *day, tzinfo=UTC) for day in ((3, 1), (7, 1), (12, 31)))
TRAININGS = {
    "never": 0, "weekly": 26, "monthly": 6, "on-drift-alarm": 6, "controller": 2, "oracle": 3,
}  # fmt: skip
GAINS = {
    "never": 0.0, "weekly": 0.024, "monthly": 0.021, "on-drift-alarm": 0.02,
    "controller": 0.0225, "oracle": 0.0265,
}  # fmt: skip


def metric(value: float, half: float = 0.004) -> Metric:
    return Metric(value=value, low=value - half, high=value + half)


def replay(seed: int = 7, controller: float = GAINS["controller"], **changes: Any) -> ReplayResult:
    """A year of six policies with faults and permuted years; `controller`: its gain."""
    rng = np.random.default_rng(seed)
    gains = GAINS | {"controller": controller}
    weather = 0.72 + 0.015 * rng.standard_normal(44)
    day = timedelta(days=1)
    splits = DataSplits.between(*(START - days * day for days in (50, 20, 10, 0)))
    model = {
        "number": 1, "made": START, "kind": "training", "splits": splits,
        "program_sha256": "a" * 64, "quality": metric(0.74), "use": {"cpu_s": 140},
    }  # fmt: skip
    values = {
        "use_case": "flights",
        "question": "Will this flight arrive late?",
        "quality_name": "AUC",
        "history": TimeWindow(start=START, end=END),
        "tuned_on": TimeWindow(start=START, end=JULY),
        "held_out": TimeWindow(start=JULY, end=END),
        "seed": seed,
        "policies": [_policy(name, gains, weather, rng) for name in GAINS],
        "models": [model],
        "false_alarms": {
            "num_days": 305, "refused": 0, "alerts": 4, "data_faults": 1,
            "sentences": ["wind_speed: 1,048 at the most, more than ever seen"],
        },
        "faults": _faults(),
        "permuted": {
            "num_years": 12, "retrainings": 0, "recalibrations": 2, "drift_alarm_retrainings": 31,
        },
        "recommended": "controller",
        "sentence": "Run the controller: as good as monthly retraining, with a third of its work.",
        "scores": Artifact(uri="artifact:replays/3/scores.parquet", sha256="b" * 64, num_bytes=1),
    }  # fmt: skip
    return ReplayResult.model_validate(values | changes)


def _policy(
    name: str, gains: dict[str, float], weather: np.ndarray, rng: np.random.Generator
) -> dict[str, Any]:
    number, gain = TRAININGS[name], gains[name]
    step = (END - JULY) / max(number, 1)
    acts = [
        {"at": JULY + n * step, "action": "retrain", "reason": f"{name} asked for it", "model": 1,
         "promoted": n % 3 == 0, "closed": () if n % 3 == 0 else ("better than the champion",)}
        for n in range(number)
    ]  # fmt: skip
    weeks = [
        {"start": (START + timedelta(weeks=n)).date(),
         "quality": None if n == 9 else base + (gain + 0.003 * rng.standard_normal()) * (n > 17)}
        for n, base in enumerate(weather)
    ]  # fmt: skip
    parts = {
        part: {
            "window": TimeWindow(start=start, end=end), "quality": metric(0.71 + share * gain),
            "to_never": metric(share * gain), "regret": metric(share * (gains["oracle"] - gain)),
            "to_monthly": metric(share * (gain - gains["monthly"]), 0.001),
            "to_controller": metric(share * (gain - gains["controller"]), 0.001),
            "num_trainings": trainings, "use": _use(trainings),
            "gain_per_cpu_hour": metric(gain / trainings * 20, 0.01) if trainings else None,
        }
        for part, start, end, trainings, share in (
            ("tuned_on", START, JULY, number // 2, 0.5), ("held_out", JULY, END, number, 1.0),
        )
    }  # fmt: skip
    reign = {"window": TimeWindow(start=START, end=END), "model": 1}
    return {"policy": name, "reigns": [reign], "acts": acts, "weeks": weeks, **parts}


def _use(number: int) -> dict[str, Any]:
    if not number:
        return {}
    return {"seconds": 80 * number, "cpu_s": 140 * number, "joules": 2100 * number,
            "estimated": True, "amount": 0.0011 * number}  # fmt: skip


def _faults() -> list[dict[str, Any]]:
    def fault(name: str, month: int, hours: float | None, **changes: Any) -> dict[str, Any]:
        start = datetime(2013, month, 1, tzinfo=UTC)
        seen = {"by": "drift check", "sentence": "temp of weather has other numbers"}
        late = (hours or 0, True, seen), ((hours or 0) / 3, False, seen | {"by": "monitoring"})
        sightings = [
            {**words, "at": start + timedelta(hours=after), "names_cause": names}
            for after, names, words in late if hours is not None
        ]  # fmt: skip
        return {
            "fault": f"{name}@{month:02}-01", "kind": name, "start": start, "end": None,
            "described": "weather.temp in degrees Celsius, 21,000 rows", "size": 4.2,
            "sightings": sightings, "answer": "alert", "verdict": "right", **changes,
        }  # fmt: skip

    return [
        fault("celsius", 7, 6.0), fault("freeze", 8, 30.0, verdict="late", size=None),
        fault("labels-flipped", 9, None, answer="nothing", verdict="missed", size=None),
        fault("scale", 11, 12.0, answer="retrain", verdict="wrong"),
    ]  # fmt: skip
