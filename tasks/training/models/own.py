"""A PyTorch module of the user's: found, built, checked and exported. See docs/how-to/own-model.md.

Its code is the user's own, from the project folder or an installed package, and never from a store.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tasks.contracts.data import DatasetSchema, TaskKind
from tasks.kernel.errors import ConfigurationError
from tasks.training.config import TrainingConfig
from tasks.training.core.network import exported, scored
from tasks.training.core.objective import Objective
from tasks.training.core.run_directory import TrainingJob
from tasks.training.data.preprocess import NO_CODE, Preprocessing
from tasks.training.models.source import HELP


@dataclass(frozen=True)
class ModelColumns:
    """What a module is built for.

    Args:
        categorical: names of the category columns.
        table_sizes: of each of them; `positions` are below it, and the last one is all that is
            unknown, rare or missing.
        numeric: names of the number columns.
        quantiles: of each of them in the training rows, increasing; none where it is constant.
        task: `classification` or `regression`.
    """

    categorical: tuple[str, ...]
    table_sizes: tuple[int, ...]
    numeric: tuple[str, ...]
    quantiles: tuple[tuple[float, ...], ...]
    task: TaskKind

    @classmethod
    def of(cls, columns: DatasetSchema, fitted: Preprocessing) -> ModelColumns:
        """Of columns, and what was fitted on their training rows."""
        return cls(
            columns.categorical,
            tuple(len(vocabulary) + 1 for vocabulary in fitted.vocabularies),
            columns.numeric,
            tuple(tuple(map(float, edges)) for edges in fitted.edges),
            columns.task,
        )


def build(
    model: str, project: Path | None, columns: ModelColumns, config: TrainingConfig
) -> nn.Module:
    """The user's module for these columns; imports and runs code of theirs.

    Raises:
        ConfigurationError: it cannot be imported, fails, or gives no module.
    """
    module, _, name = model.partition(":")
    if project is not None and str(project) not in sys.path:
        sys.path.append(str(project))  # last: nothing in it takes the place of an installed package
    made = _run(model, lambda: getattr(importlib.import_module(module), name)(columns, config))
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"{model} gave a {type(made).__name__}, expected a torch.nn.Module. {HELP}"
        )
    return made


def _run(what: str, call: Callable[[], Any]) -> Any:
    """Run code of the user's; whatever it raises becomes one of our errors, with its own chain."""
    try:
        return call()
    except Exception as exc:
        where = exc.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f" ({where.tb_frame.f_code.co_filename}, line {where.tb_lineno})" if where else ""
        raise ConfigurationError(
            f"{what} failed{place}: {type(exc).__name__}: {exc}. {HELP}"
        ) from exc


def own_losses(module: nn.Module, objective: Objective) -> Callable[[Tensor, Tensor], Tensor]:
    """Loss of each row: the module's own where it has a method `loss`, else the objective's."""
    loss = getattr(module, "loss", None)
    if loss is None:
        return objective.row_losses
    return lambda outputs, labels: loss(outputs, objective.standardised(labels))


def check_module(job: TrainingJob) -> None:
    """Build the module for columns like those of the job, before a row is read; try all of it.

    Raises:
        ConfigurationError: what it gives is not one number a row, its loss is not one a row, or it
            cannot be exported.
    """
    assert job.config.own_model is not None
    model, schema = job.config.own_model, job.columns
    fitted = Preprocessing(
        vocabularies=tuple(np.array([1, 2], dtype=np.int32) for _ in schema.categorical),
        edges=tuple(np.array([0.0, 0.5, 1.0], dtype=np.float32) for _ in schema.numeric),
        flagged=(),
    )
    module = build(model, job.project, ModelColumns.of(schema, fitted), job.config).eval()
    rows = 3
    positions = torch.zeros(rows, len(schema.categorical), dtype=torch.int64)
    numeric = torch.full((rows, len(schema.numeric)), 0.5)
    numeric[0] = torch.nan
    outputs = _run(f"the module of {model}", lambda: module(positions, numeric))
    _check_rows("outputs", model, outputs, rows)
    if not bool(torch.isfinite(outputs).all()):
        raise ConfigurationError(
            f"the module of {model} gives {outputs[0].item()} for a row whose numbers are missing "
            f"(NaN); expected a finite number. Fill what is missing first. {HELP}"
        )
    if (loss := getattr(module, "loss", None)) is not None:
        losses = _run(f"the loss of {model}", lambda: loss(outputs, torch.ones(rows)))
        _check_rows("losses", model, losses, rows)
    _run(f"exporting the module of {model} with torch.export", lambda: export_own(module, fitted))


def _check_rows(what: str, model: str, seen: object, rows: int) -> None:
    shape = tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
    if shape != (rows,):
        raise ConfigurationError(
            f"the {what} of the module of {model} have shape {shape} for {rows} rows, expected "
            f"({rows},): one number a row. {HELP}"
        )


class OwnProgram(nn.Module):
    """A user's module as it is exported: category codes become positions inside."""

    def __init__(self, module: nn.Module, fitted: Preprocessing) -> None:
        super().__init__()
        self.module = module
        self.labels = fitted.labels
        self.unknown = [len(vocabulary) for vocabulary in fitted.vocabularies]
        for number, vocabulary in enumerate(fitted.vocabularies):
            # The first entry is no code, so it never matches: an empty vocabulary needs no more.
            codes = torch.from_numpy(np.insert(vocabulary, 0, NO_CODE).astype(np.int32))
            places = torch.arange(-1, len(vocabulary)) - len(vocabulary)
            self.register_buffer(f"codes_{number}", codes)
            self.register_buffer(f"places_{number}", places)

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """As `core.network.ScoringProgram.forward`."""
        positions = []
        for number, unknown in enumerate(self.unknown):
            known = categorical[:, number : number + 1] == self.get_buffer(f"codes_{number}")
            positions.append((known * self.get_buffer(f"places_{number}")).sum(1) + unknown)
        empty = categorical.to(torch.int64)  # without a category column
        outputs: Tensor = self.module(torch.stack(positions, 1) if positions else empty, numeric)
        return scored(outputs, self.labels)


def export_own(module: nn.Module, fitted: Preprocessing) -> bytes:
    """A user's module as a program file, see `core.network.exported`."""
    return exported(OwnProgram(module, fitted), len(fitted.vocabularies), len(fitted.edges))
