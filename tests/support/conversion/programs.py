"""Small programs of the same shape as the trained one, and other ones that go wrong."""

import io
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from tasks.contracts.conversion import SnapshotRows
from tasks.contracts.data import ValidatedDataset, category_code
from tasks.contracts.release import BuiltVariant, ModelVariant, RegisteredProgram
from tasks.conversion.config import ConversionConfig
from tasks.conversion.targets.catalog import with_sources
from tasks.conversion.targets.interface import ConversionJob
from tasks.conversion.variants import build_variant
from tasks.kernel.settings import ArtifactStore, StagedFolder, content_key
from tests.support.data.builders import COLUMNS, dataset, splits, variant, version_ref

VOCABULARY = {
    "carrier": ("AA", "UA", "EV", "B6"),
    "origin": ("EWR", "JFK", "LGA"),
    "dest": ("IAH", "MIA", "ORD", "LAX"),
}
RANGES = {
    "distance": (100.0, 2500.0),
    "minute_of_day": (300.0, 1380.0),
    "late_rate_24h": (0.0, 0.6),
    "temp": (10.0, 95.0),
    "gust": (0.0, 60.0),
}
BINS = 8
QUICK = ConversionConfig(batch_sizes=(1, 8), measurement="quick")


class SmallNetwork(nn.Module):
    """Category codes and numbers in, probability out, with all preprocessing inside."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        owners, codes = [], []
        for position, name in enumerate(COLUMNS.categorical):
            owners += [position] * len(VOCABULARY[name])
            codes += [category_code(value) for value in VOCABULARY[name]]
        edges = [np.linspace(*RANGES[name], BINS + 1) for name in COLUMNS.numeric]
        self.register_buffer("column_of", torch.tensor(owners))
        self.register_buffer("vocabulary", torch.tensor(codes, dtype=torch.int32))
        self.register_buffer("owner", torch.arange(len(edges)).repeat_interleave(BINS))
        self.register_buffer("low", _float(np.concatenate([e[:-1] for e in edges])))
        self.register_buffer("scale", _float(np.concatenate([1 / np.diff(e) for e in edges])))
        self.table = nn.Parameter(torch.randn(len(codes), 16) * 0.5)
        self.bias = nn.Parameter(torch.randn(16) * 0.1)
        width = 16 + len(edges) * (BINS + 1)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        hot = (categorical.index_select(1, self.column_of) == self.vocabulary).float()
        missing = torch.isnan(numeric)
        filled = torch.where(missing, -1e9, numeric)
        bins = ((filled.index_select(1, self.owner) - self.low) * self.scale).clamp(0.0, 1.0)
        inputs = torch.cat([hot @ self.table + self.bias, bins, missing.float()], dim=1)
        return torch.sigmoid(self.perceptron(inputs)).squeeze(1)


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


class Decided(SmallNetwork):
    """Gives probabilities from near 0 to near 1, as a network does that was trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        last = self.perceptron[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.bias.copy_((last.bias - 0.115) * 60)  # the logits of rows are about 0.115
            last.weight.mul_(60)


class SwappedColumns(SmallNetwork):
    """Takes the numbers in another order than the schema says."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return super().forward(categorical, numeric.flip(1))


class NotANumber(SmallNetwork):
    """Forgets to replace missing numbers, so they reach the result."""

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        return super().forward(categorical, numeric) + numeric.sum(1) * 0


class Elementwise(nn.Module):
    """Any function of the numbers, row by row: shows operators that a format lacks."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        known = torch.nan_to_num(numeric) + categorical.float().sum(1, keepdim=True) * 0
        return torch.sigmoid(self.function(known))


def exported(network: nn.Module, *, dynamic: bool = True) -> bytes:
    """The network as a `torch.export` program file."""
    example = (
        torch.zeros(2, len(COLUMNS.categorical), dtype=torch.int32),
        torch.zeros(2, len(COLUMNS.numeric)),
    )
    batch = torch.export.Dim("batch", min=1, max=65536)
    shapes = {"categorical": {0: batch}, "numeric": {0: batch}} if dynamic else None
    program = torch.export.export(network.eval(), example, dynamic_shapes=shapes)
    content = io.BytesIO()
    torch.export.save(program, content)
    return content.getvalue()


def registered(store: ArtifactStore, rows: ValidatedDataset, content: bytes) -> RegisteredProgram:
    """A program file in the store, as the registry room hands it on."""

    def build(folder: StagedFolder) -> RegisteredProgram:
        (folder.path / "model.pt2").write_bytes(content)
        program = folder.artifact("model.pt2")
        version = version_ref(program.sha256, rows.snapshot.data.sha256)
        return RegisteredProgram(version=version, program=program, columns=rows.snapshot.columns)

    return store.build_once("programs", content_key(content.hex()), RegisteredProgram, build)


def tabular_job(
    store: ArtifactStore, network: nn.Module | bytes, config: ConversionConfig = QUICK
) -> ConversionJob:
    """A network, or a program file, to be converted with the rows of a small snapshot."""
    content = network if isinstance(network, bytes) else exported(network)
    rows = dataset(store)
    source = SnapshotRows(dataset=rows, splits=splits())
    return ConversionJob(registered(store, rows, content), source, config, store)


def with_formats(job: ConversionJob, *names: str) -> ConversionJob:
    """The same job for other formats."""
    return replace(job, config=job.config.model_copy(update={"formats": names}))


def built(job: ConversionJob, *given: BuiltVariant) -> tuple[BuiltVariant, ...]:
    """The targets and all they are made from, as the flow builds them; `given` ones are taken."""
    made = {one.name: one for one in given}
    for target in with_sources(job.config.formats):
        if target.name not in made:
            sources = tuple(made[name] for name in target.made_from)
            made[target.name] = build_variant(target, job, sources)
    return tuple(made.values())


def build_one(name: str, job: ConversionJob, *given: BuiltVariant) -> BuiltVariant:
    """One target; what it is made from is built too where it is not given."""
    return built(with_formats(job, name), *given)[-1]


def kept(one: BuiltVariant, program: RegisteredProgram, hardware: str = "cpu") -> ModelVariant:
    """A built form as the judge would hand it on, had it won."""
    assert one.files is not None, one.failure
    built = {"name", "format", "precision", "settings", "provenance"}
    source = program.program.sha256
    return variant(source, one.files, hardware_class=hardware, **one.model_dump(include=built))
