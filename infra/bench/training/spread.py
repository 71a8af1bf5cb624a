"""How far the AUC of the same training comes out apart: over seeds, rounding and ranks.

Each case is trained with the mean of weights kept and with the best epoch's own weights. In place
of another host's rounding the learning rate is 1e-7 larger: the last digits of all weights differ
after one step. Spreads are shares of the margin by which a candidate may lie below the champion.
"""

import statistics
from collections.abc import Callable

from sklearn.metrics import roc_auc_score

from infra.bench.figures import Figure, at_most
from infra.bench.parts import Bench
from infra.bench.training.trainings import Trainings
from tasks.evaluation.scoring import Program, score_rows
from tasks.training.config import TrainingConfig

BOUNDS = {"seeds": 1.0, "rounding": 0.3, "two ranks": 0.5}

TestAuc = Callable[[TrainingConfig], float]


def figures(bench: Bench) -> list[Figure]:
    """All figures; about an hour on two quiet cores."""
    auc, base = _trainer(bench), bench.config.training
    margin = bench.config.promotion.champion_margin
    seeds = range(bench.size(8, 2))
    perturbed = range(bench.size(3, 1))
    means = _spreads(auc, base, seeds, perturbed)
    own = _spreads(auc, base.model_copy(update={"average_decay": 0.0}), seeds, perturbed)
    found = []
    for what, bound in BOUNDS.items():
        name, widest = f"AUC, spread over {what} to the margin", _widest(what, means[what])
        told = f"{_described(what, means[what])}; own weights: {_described(what, own[what])}"
        found.append(at_most(name, widest / margin, bound, told))
    return found


def _spreads(
    auc: TestAuc, base: TrainingConfig, seeds: range, perturbed: range
) -> dict[str, list[float]]:
    """AUC of each seed; and how far those of some move by rounding, and by a second rank."""

    def of(seed: int, ranks: int = 1, rate: float = 1.0) -> float:
        launch = base.launch.model_copy(update={"ranks": ranks})
        changed = {"launch": launch, "learning_rate": base.learning_rate * rate, "seed": seed}
        return auc(base.model_copy(update=changed))

    aucs = [of(seed) for seed in seeds]
    return {
        "seeds": aucs,
        "rounding": [abs(of(seed, rate=1 + 1e-7) - aucs[seed]) for seed in perturbed],
        "two ranks": [abs(of(seed, ranks=2) - aucs[seed]) for seed in perturbed],
    }


def _widest(what: str, values: list[float]) -> float:
    return max(values) - min(values) if what == "seeds" else max(values)


def _described(what: str, values: list[float]) -> str:
    text = f"{_widest(what, values):.4f} over {len(values)} seeds"
    if what == "seeds":
        text += f", mean {statistics.mean(values):.4f}, deviation {statistics.pstdev(values):.4f}"
    return text


def _trainer(bench: Bench) -> TestAuc:
    """Trains with a configuration on the finished loop's data; the AUC of its test window."""
    trainings = Trainings(bench)
    dataset, store = trainings.dataset, trainings.store
    label = dataset.snapshot.columns.label

    def train(config: TrainingConfig) -> float:
        model = trainings.train(config)
        program = Program.open(model.program, model.columns, store)
        rows = score_rows(program, dataset, trainings.splits.test, [label], store)
        rows = rows[rows[label].notna()]
        return float(roc_auc_score(rows[label], rows["score"]))

    return train
