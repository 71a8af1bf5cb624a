"""Small studies, with trials of every kind, for the pages of searches."""

from typing import Any

from tasks.contracts.training import SearchedField, StudyRecord, TrialRecord
from tests.support.data.builders import epoch

FIELDS = (
    SearchedField(name="learning_rate", low=1e-4, high=1e-1, log=True),
    SearchedField(name="dropout", low=0.0, high=0.5),
    SearchedField(name="hidden_sizes", choices=("[32]", "[64, 32]")),
)


def trial(number: int, state: str = "complete", auc: float | None = 0.7, **changes: Any) -> Any:
    curve = [] if auc is None else [auc - 0.02, auc]
    return TrialRecord.model_validate(
        {
            "number": number,
            "state": state,
            "point": {
                "learning_rate": 10 ** (-4 + number % 4),
                "dropout": 0.05 * (number % 10),
                "hidden_sizes": FIELDS[2].choices[number % 2],
            },
            "auc": auc,
            "epochs": [epoch(n, value) for n, value in enumerate(curve)],
            "seconds": 2.0,
            **changes,
        }
    )


def study(*trials: TrialRecord, **changes: Any) -> StudyRecord:
    complete = [t for t in trials if t.state == "complete" and t.auc is not None]
    best = max(complete, key=lambda t: t.auc or 0, default=None)
    return StudyRecord.model_validate(
        {
            "study": "search-0123456789ab",
            "use_case": "flights",
            "fields": FIELDS,
            "trials": trials,
            "best": best.number if best else None,
            "importance": {"learning_rate": 0.7, "dropout": 0.2, "hidden_sizes": 0.1},
            "sampler": "tpe",
            "pruner": "median",
            "storage": "sqlite",
            "max_epochs": 2,
            "ended_because": "num_trials=4 trials are done",
            **changes,
        }
    )
