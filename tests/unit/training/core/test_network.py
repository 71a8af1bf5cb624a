import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tasks.contracts.data import category_code
from tasks.training.config import TrainingConfig
from tasks.training.core.network import NumberEncoding, ScoringProgram, export_program
from tasks.training.data.preprocess import Preprocessing
from tests.support.training.parents import network_of, preprocessing, raw_rows


def encoded_slowly(fitted: Preprocessing, row: list[float]) -> list[float]:
    """The piecewise-linear encoding of one row as the paper writes it, bin by bin."""
    outputs = []
    for value, edges in zip(row, fitted.edges, strict=True):
        for left, right in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if np.isnan(value) or value < left:
                outputs.append(0.0)
            elif value >= right:
                outputs.append(1.0)
            else:
                outputs.append((value - left) / (right - left))
    return outputs + [float(np.isnan(row[position])) for position in fitted.flagged]


@given(st.lists(st.floats(width=32) | st.floats(-100, 200, width=32), min_size=4, max_size=4))
def test_the_number_encoding_agrees_with_the_papers_formula(row: list[float]) -> None:
    fitted = preprocessing()
    encoded = torch.cat(NumberEncoding(fitted)(torch.tensor([row], dtype=torch.float32)), dim=1)
    assert encoded.shape == (1, NumberEncoding(fitted).num_outputs)
    np.testing.assert_allclose(encoded[0], encoded_slowly(fitted, row), atol=1e-5)
    assert ((encoded >= 0) & (encoded <= 1)).all()


def test_the_number_encoding_gives_the_same_bytes_in_training_and_leaves_its_input() -> None:
    fitted = preprocessing()
    numbers = torch.from_numpy(raw_rows(fitted, 300)[1])
    numbers[0], numbers[1], numbers[2] = torch.nan, torch.inf, -torch.inf
    encoding, before = NumberEncoding(fitted), numbers.numpy().tobytes()
    trained, evaluated = (encoding.train(mode)(numbers) for mode in (True, False))
    assert [t.numpy().tobytes() for t in trained] == [e.numpy().tobytes() for e in evaluated]
    assert numbers.numpy().tobytes() == before


def test_the_folded_program_agrees_with_the_lookup_tables() -> None:
    fitted = preprocessing()
    network = network_of(fitted)
    codes, numeric = raw_rows(fitted, 300)
    with torch.no_grad():
        positions = torch.from_numpy(fitted.category_positions(codes))
        looked_up = torch.sigmoid(network(positions, torch.from_numpy(numeric)))
        folded = ScoringProgram(network, fitted)(torch.from_numpy(codes), torch.from_numpy(numeric))
    torch.testing.assert_close(folded, looked_up, atol=1e-6, rtol=0)


def test_unseen_missing_and_rare_categories_give_exactly_the_unknown_vector() -> None:
    fitted = preprocessing()
    program = ScoringProgram(network_of(fitted), fitted)
    numeric = torch.zeros(3, 4)
    codes = np.array([[category_code(c)] * 3 for c in ("never", None, "rare")], dtype=np.int32)
    scores = program(torch.from_numpy(codes), numeric)
    assert torch.equal(scores, scores[0].expand(3))


def test_category_dropout_hides_categories_in_training_only() -> None:
    fitted = preprocessing()
    config = TrainingConfig(hidden_sizes=(16,), dropout=0.0, category_dropout=0.9)
    network = network_of(fitted, config)
    positions, numeric = torch.zeros(50, 3, dtype=torch.int64), torch.zeros(50, 4)
    with torch.no_grad():
        assert network(positions, numeric).unique().numel() == 1
        assert network.train()(positions, numeric).unique().numel() > 1


@pytest.mark.parametrize(
    "fitted",
    [
        pytest.param(preprocessing(), id="all kinds"),
        pytest.param(Preprocessing((), preprocessing().edges, (3,)), id="numbers only"),
        pytest.param(Preprocessing(preprocessing().vocabularies, (), ()), id="categories only"),
        pytest.param(
            Preprocessing(
                (np.empty(0, np.int32),), (np.empty(0, np.float32), *preprocessing().edges), ()
            ),
            id="empty vocabulary",
        ),
    ],
)
def test_the_exported_program_answers_like_the_network_for_any_batch(fitted: Preprocessing) -> None:
    network = network_of(fitted)
    program = torch.export.load(io.BytesIO(export_program(network, fitted))).module()
    for rows in (1, 2, 7, 1024):
        codes, numeric = raw_rows_of(fitted, rows)
        expected = ScoringProgram(network, fitted)(codes, numeric)
        torch.testing.assert_close(program(codes, numeric), expected, atol=1e-6, rtol=0)
        assert program(codes, numeric).shape == (rows,)


def raw_rows_of(fitted: Preprocessing, rows: int) -> tuple[Tensor, Tensor]:
    if not fitted.vocabularies:
        codes = np.empty((rows, 0), dtype=np.int32)
        numeric = np.random.default_rng(0).normal(40, 60, (rows, 4)).astype(np.float32)
    else:
        codes, numeric = raw_rows(fitted, rows)
    return torch.from_numpy(codes), torch.from_numpy(numeric)


@pytest.mark.slow
def test_the_program_runs_without_any_code_of_ours(tmp_path: Path) -> None:
    fitted = preprocessing()
    path = tmp_path / "model.pt2"
    path.write_bytes(export_program(network_of(fitted), fitted))
    program = (
        "import sys, torch; program = torch.export.load(sys.argv[1]).module()\n"
        "for rows in (1, 65536):\n"
        "    codes = torch.zeros(rows, 3, dtype=torch.int32)\n"
        "    assert program(codes, torch.zeros(rows, 4)).shape == (rows,)\n"
        "assert 'tasks' not in sys.modules"
    )
    subprocess.run([sys.executable, "-I", "-c", program, path], check=True, cwd=tmp_path)


def test_the_same_network_exports_to_the_same_bytes() -> None:
    fitted = preprocessing()
    assert export_program(network_of(fitted), fitted) == export_program(network_of(fitted), fitted)
