"""The mean of a network and boosted trees, as one program.

The mean is that of logits (of a regression, of standardised labels), so the program ends as each of
the two does, and another map of the scores has its place. On flights the mean of probabilities has
the same AUC; see `docs/decisions/0134-average-of-network-and-trees.md`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tasks.contracts.training import EpochMetrics, TrainedModel
from tasks.kernel.files import write_atomically
from tasks.kernel.settings import ArtifactStore, StagedFolder, code_digest, content_key
from tasks.training.checkpoints.store import serialized
from tasks.training.config import TrainingConfig
from tasks.training.core.network import ScoringProgram, TabularNetwork, exported, scored
from tasks.training.core.objective import objective_of
from tasks.training.core.run_directory import TrainingRequest
from tasks.training.data.preprocess import Preprocessing
from tasks.training.models.boosting import BLOCK_ROWS, Rows, measured, read_rows
from tasks.training.models.trees import BoostingProgram


class AverageProgram(nn.Module):
    """A network and boosted trees that answer together."""

    def __init__(self, network: ScoringProgram, boosting: BoostingProgram) -> None:
        super().__init__()
        self.network = network
        self.boosting = boosting

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """As `core.network.ScoringProgram.forward`."""
        return scored(self.outputs(categorical, numeric), self.network.labels)

    def outputs(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """Mean of both logits, or standardised labels, float32 (rows,), or (rows, classes)."""
        network = self.network.outputs(categorical, numeric)
        return (network + self.boosting.outputs(categorical, numeric)) * 0.5


def average_of(
    request: TrainingRequest, network: TrainedModel, boosting: TrainedModel, store: ArtifactStore
) -> TrainedModel:
    """The model that gives the mean of two; its last epoch is what both have together.

    Args:
        request: what both were trained for.
        network: the best epoch of the network.
        boosting: the trees.
        store: holds both, and takes the mean.

    Raises:
        ArtifactError: a checkpoint or the snapshot is absent or damaged.
        StorageError: the disk refused a write.
    """
    parts = (network.program.sha256, boosting.program.sha256)
    sha256 = request.dataset.snapshot.data.sha256
    key = content_key(
        "average", code_digest(__file__), torch.__version__, *parts, sha256, request.splits
    )

    def build(folder: StagedFolder) -> TrainedModel:
        of_network, of_trees = (
            torch.load(store.path(part.checkpoint), map_location="cpu", weights_only=True)
            for part in (network, boosting)
        )
        fitted = Preprocessing.of_state(of_network["preprocessing"])
        whole = TabularNetwork(fitted, TrainingConfig.model_validate(network.config))
        whole.load_state_dict(of_network["network"])
        trees = BoostingProgram.of_state(of_trees["boosting"])
        program = AverageProgram(ScoringProgram(whole, fitted), trees).eval()
        objective = objective_of(fitted.num_outputs, fitted.labels)
        path = store.path(request.dataset.snapshot.data)
        train, _ = read_rows(request, path, request.splits.train)
        (train_loss,), _ = measured(objective, _outputs(program, train.for_losses()))
        chosen_on, _ = read_rows(request, path, request.splits.validation)
        (validation_loss,), (quality,) = measured(objective, _outputs(program, chosen_on))
        epoch = EpochMetrics(
            epoch=len(network.epochs),
            train_loss=train_loss,
            validation_loss=validation_loss,
            **quality,
            learning_rate=request.config.boosting.learning_rate,
            seconds=boosting.seconds,
            rows_per_s=len(train.labels) / max(boosting.seconds, 1e-9),
        )
        columns = request.columns
        content = exported(program, len(columns.categorical), len(columns.numeric))
        write_atomically(folder.path / "model.pt2", content)
        state = {**of_network, **of_trees, "epoch": epoch.epoch}
        write_atomically(folder.path / "best.pt", serialized(state))
        logs = [store.path(part.log).read_text() for part in (network, boosting)]
        write_atomically(folder.path / "training.log", "\n".join(logs))
        return network.model_copy(
            update={
                "program": folder.artifact("model.pt2"),
                "checkpoint": folder.artifact("best.pt"),
                "log": folder.artifact("training.log"),
                "epochs": (*network.epochs, epoch),
                "best_epoch": epoch.epoch,
                "strategy": f"{network.strategy}, and {boosting.strategy}",
                "num_parameters": network.num_parameters + boosting.num_parameters,
                "seconds": network.seconds + boosting.seconds,
            }
        )

    made = store.build_once("models", key, TrainedModel, build)
    return made.model_copy(update={"config": request.config.model_dump(mode="json")})


def _outputs(program: AverageProgram, rows: Rows) -> Iterator[tuple[Tensor, Tensor]]:
    with torch.inference_mode():
        for codes, numbers, labels in rows.blocks(BLOCK_ROWS):
            yield program.outputs(codes, numbers)[:, None], labels
