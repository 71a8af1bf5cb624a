from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from tasks.contracts.data import ColumnEncoder
from tasks.evaluation.scoring import Program, score_rows
from tasks.kernel.errors import DataContractError
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.data.builders import COLUMNS
from tests.support.evaluation.programs import LateRate, NotANumber, stored_program


def opened(store: ArtifactStore, network: nn.Module, *, dynamic: bool = True) -> Program:
    program = stored_program(store, network, dynamic=dynamic)
    return Program.open(program.program, program.columns, store)


def test_scores_are_those_of_the_network_whatever_the_batches(store: ArtifactStore) -> None:
    data = builders.frame(1000)
    dataset = builders.dataset(store, data)
    program = opened(store, LateRate())
    whole, pieces = (
        score_rows(program, dataset, builders.month(3, 2), ("flight_id",), store, rows)
        for rows in (65536, 7)
    )
    months = data["event_timestamp"].dt.month.isin([3, 4])
    categorical, numeric = COLUMNS.model_inputs(data[months])
    expected = LateRate()(torch.from_numpy(categorical), torch.from_numpy(numeric))
    assert whole["flight_id"].tolist() == data.loc[months, "flight_id"].tolist()
    assert whole["score"].to_numpy() == pytest.approx(expected.numpy())
    assert pieces["score"].to_numpy() == pytest.approx(whole["score"].to_numpy())


def test_a_model_of_another_encoder_is_not_asked(store: ArtifactStore) -> None:
    encoder = ColumnEncoder(
        column="note", kind="text", source="words 1", sha256="0" * 64, dimensions=1
    )
    columns = COLUMNS.model_copy(update={"encoders": (encoder,)})
    program = replace(opened(store, LateRate()), columns=columns)
    with pytest.raises(DataContractError, match=r"takes note as encoder 0{12} \(words 1\)"):
        score_rows(program, builders.dataset(store), builders.month(3), (), store)


def test_a_small_network_is_computed_by_one_thread(store: ArtifactStore) -> None:
    network, threads = LateRate(), list[int]()
    network.register_forward_hook(lambda *_: threads.append(torch.get_num_threads()))
    torch.set_num_threads(2)
    program = replace(opened(store, LateRate()), module=network)
    score_rows(program, builders.dataset(store), builders.month(3), (), store)
    assert set(threads) == {1}
    assert torch.get_num_threads() == 2


class TwoColumns(LateRate):
    """Gives a score for each class, where one is expected."""

    def forward(self, categorical: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        return torch.stack([super().forward(categorical, numeric)] * 2, dim=1)


class Logits(LateRate):
    """Forgets the sigmoid."""

    def forward(self, categorical: torch.Tensor, numeric: torch.Tensor) -> torch.Tensor:
        return torch.logit(super().forward(categorical, numeric)) * 3


@pytest.mark.parametrize(
    ("network", "dynamic", "message"),
    [
        (TwoColumns(), True, r"returned \(50, 2\) for 50 rows, expected a tensor of shape \(50,\)"),
        (NotANumber(), True, r"scores of 50 that are no probabilities \(\d+ of them NaN\)"),
        (Logits(), True, r"scores of 50 that are no probabilities \(0 of them NaN\)"),
        (LateRate(), False, "dynamic batch axis"),
    ],
)
def test_a_program_that_gives_no_probabilities_or_takes_one_batch_is_refused(
    store: ArtifactStore, network: nn.Module, dynamic: bool, message: str
) -> None:
    with pytest.raises(DataContractError, match=message):
        opened(store, network, dynamic=dynamic).score(builders.frame(50))


def test_missing_and_unknown_values_are_scored(store: ArtifactStore) -> None:
    rows = builders.frame(20)
    rows["carrier"] = [None, "", "ZZ", *rows["carrier"][3:]]
    rows.loc[5, list(COLUMNS.numeric)] = np.nan
    assert np.isfinite(opened(store, LateRate()).score(pd.DataFrame(rows))).all()
