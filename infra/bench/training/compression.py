"""Fewer bytes between ranks, and what that does to the model.

Two ranks train the use case's network on the finished loop's snapshot, in each way and from several
seeds. Bytes are those that the ranks gave to the network.
"""

from statistics import fmean

from infra.bench.figures import Measured, at_most
from infra.bench.parts import Bench
from infra.bench.training.trainings import Trainings, two_ranks
from tasks.contracts.training import TrainedModel
from tasks.training.config import TrainingConfig
from tasks.training.strategies.config import StrategyConfig

SEEDS = (0, 1, 2)
# Changes of the strategy, and the bound of its bytes in those of fp32. Averaging every eighth step
# sends an eighth of the values, and the first weights.
WAYS: dict[str, tuple[dict[str, object], float]] = {
    "fp16": ({"gradient_compression": "fp16"}, 0.5),
    "PowerSGD": ({"gradient_compression": "powersgd"}, 1 / 20),
    "8 local steps": ({"local_steps": 8}, 1.1 / 8),
    "8 steps, late mean": ({"local_steps": 8, "asynchronous": True}, 1.1 / 8),
}


def figures(bench: Bench) -> Measured:
    """Measure on the snapshot of the newest finished loop."""
    epochs, sizes, seeds = bench.size((2, (256, 128), SEEDS), (1, (16,), SEEDS[:2]))
    changed = {"max_epochs": epochs, "hidden_sizes": sizes}
    base = two_ranks(bench.config.training).model_copy(update=changed)
    trainings = Trainings(bench)

    def trained(changes: dict[str, object]) -> list[TrainedModel]:
        strategy = StrategyConfig.model_validate(changes)
        configs = (base.model_copy(update={"strategy": strategy, "seed": s}) for s in seeds)
        return [trainings.train(TrainingConfig.model_validate(c.model_dump())) for c in configs]

    plain = trained({})
    plain_aucs = [_auc(model) for model in plain]
    spread = max(plain_aucs) - min(plain_aucs)
    measured: Measured = []
    for way, (changes, bound) in WAYS.items():
        models = trained(changes)
        sent, mean = _sent_bytes(models[0]), fmean(map(_auc, models))
        share, kib = sent / _sent_bytes(plain[0]), f"{sent / 1024:,.1f} KiB a rank and step"
        lost = (fmean(plain_aucs) - mean) / spread
        means = f"mean {mean:.4f}, fp32's {fmean(plain_aucs):.4f}"
        apart = f"{means}, {len(seeds)} seeds that are {spread:.4f} apart"
        measured += [
            at_most(f"bytes with {way}, to fp32", share, bound, kib),
            at_most(f"AUC lost to {way}, seed spreads", lost, 1.0, apart),
        ]
    return measured


def _auc(model: TrainedModel) -> float:
    return model.epochs[-1].quality


def _sent_bytes(model: TrainedModel) -> float:
    """Mean over the ranks of a step's bytes."""
    assert model.telemetry
    return fmean(rank.wire_bytes / rank.num_steps for rank in model.telemetry.ranks)
