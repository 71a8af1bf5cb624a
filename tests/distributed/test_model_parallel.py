"""Networks cut over ranks learn what one plain process learns, and no rank holds all of them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.ranks.model_parallel_ranks import (
    CASES,
    HALF,
    LEARNING_RATE,
    NUM_RANKS,
    NUM_STEPS,
    Case,
    global_batch,
    network_of,
)
from tests.support.ranks.rank_programs import run_on_ranks
from tests.support.ranks.strategy_cases import adamw, row_losses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model_parallel")
    run_on_ranks("tests.support.ranks.model_parallel_ranks", path, NUM_RANKS)
    return path


def seen(folder: Path, name: str) -> list[Any]:
    """What each rank saw."""
    return [
        json.loads((folder / f"seen-{rank}.json").read_text())[name] for rank in range(NUM_RANKS)
    ]


@dataclass
class Plain:
    """One process that trains on whole global batches in plain PyTorch."""

    network: nn.Module
    curve: list[float]


def trained_plainly(case: Case) -> Plain:
    network = network_of(case, seed=1)
    optimizer = adamw(network.named_parameters())
    curve = []
    for step in range(NUM_STEPS):
        batch = global_batch(case, step)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        torch.manual_seed(step)  # what rank 0 drew from
        optimizer.zero_grad()
        loss = row_losses(network(*batch.inputs), batch.labels).mean()
        loss.backward()
        if case.config.max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), case.config.max_gradient_norm)
        optimizer.step()
        curve.append(loss.item())
    return Plain(network.eval(), curve)


@pytest.fixture(scope="module")
def plain() -> dict[str, Plain]:
    return {name: trained_plainly(case) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_cut_network_has_the_loss_curve_and_weights_of_one_process(
    folder: Path, plain: dict[str, Plain], name: str
) -> None:
    case, expected = CASES[name], plain[name]
    for of_rank in seen(folder, name):
        torch.testing.assert_close(
            of_rank["curve"], expected.curve, rtol=case.tolerance, atol=case.tolerance
        )
    weights: dict[str, Tensor] = torch.load(folder / f"{name}.pt", weights_only=True)
    assert list(weights["network"]) == list(expected.network.state_dict())
    for key, value in expected.network.state_dict().items():
        torch.testing.assert_close(
            weights["network"][key], value, rtol=0, atol=5 * case.tolerance, msg=f"{name}: {key}"
        )


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_evaluate_like_one_process(
    folder: Path, plain: dict[str, Plain], name: str
) -> None:
    case, network = CASES[name], plain[name].network
    near = max(1e-4, 5 * case.tolerance)
    with torch.no_grad():
        expected = network(*global_batch(case, 0).inputs)
        fewer = network(*(part[:5] for part in global_batch(case, 1).inputs))
    for of_rank in seen(folder, name):
        torch.testing.assert_close(torch.tensor(of_rank["outputs"]), expected, rtol=near, atol=near)
        torch.testing.assert_close(torch.tensor(of_rank["fewer"]), fewer, rtol=near, atol=near)
        assert of_rank["none"] == [0]


@pytest.mark.parametrize("name", CASES)
def test_a_state_from_the_middle_goes_on_where_it_was_taken(folder: Path, name: str) -> None:
    for of_rank in seen(folder, name):
        expected = of_rank["curve"][HALF:]
        assert of_rank["again"] == pytest.approx(expected, rel=CASES[name].tolerance)


@pytest.mark.parametrize("name", CASES)
def test_checksums_are_equal_on_all_ranks(folder: Path, name: str) -> None:
    of_ranks = [of_rank["checksum"] for of_rank in seen(folder, name)]
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
    assert len(of_ranks[0]) == len(list(network_of(CASES[name], 1).parameters()))


@pytest.mark.parametrize(
    ("name", "share", "num_parts"),
    [
        ("transformer, tensor", 0.28, 4),  # norms and embeddings are whole on all parts
        ("transformer, pipeline", 0.52, 2),
        ("narrow, four stages", 0.45, 4),  # two of the four stages are large
    ],
)
def test_a_rank_holds_little_more_than_its_part(
    folder: Path, name: str, share: float, num_parts: int
) -> None:
    whole = sum(p.numel() * p.element_size() for p in network_of(CASES[name], 1).parameters())
    of_ranks = seen(folder, name)
    for of_rank in of_ranks:
        assert of_rank["bytes"] < share * whole
        assert of_rank["moment_bytes"] == 2 * of_rank["bytes"]
    assert sum(of_rank["bytes"] for of_rank in of_ranks[:num_parts]) >= whole


@pytest.mark.parametrize("name", ["tabular, tensor", "tabular, pipeline"])
def test_ranks_that_share_a_replica_read_the_same_rows(folder: Path, name: str) -> None:
    assert [of_rank["data"] for of_rank in seen(folder, name)] == [[0, 2], [0, 2], [1, 2], [1, 2]]


def test_gradients_travel_between_replicas_only(folder: Path) -> None:
    for of_rank in seen(folder, "tabular, pipeline"):
        assert of_rank["wire_bytes"] == NUM_STEPS * of_rank["bytes"]
    for of_rank in seen(folder, "narrow, four stages"):
        assert of_rank["wire_bytes"] == 0


def test_cut_dropout_drops_what_dropout_of_the_whole_layer_drops(
    folder: Path, plain: dict[str, Plain]
) -> None:
    curve = seen(folder, "tabular, tensor, dropping")[0]["curve"]
    assert curve == pytest.approx(plain["tabular, tensor, dropping"].curve, rel=2e-5)
    assert curve != pytest.approx(plain["tabular, tensor"].curve, rel=1e-3)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("no plan", "Linear has no method tensor_parallel_plan"),
        ("no stages", "Linear has no method pipeline_stages"),
        ("odd layer", r"perceptron\.0 has 15 outputs, which do not divide over tensor_parallel"),
        ("odd heads", "3 attention heads do not divide over 4 ranks"),
        ("few blocks", r"pipeline_stages=4, but a perceptron with .* has 3 blocks"),
        ("few ranks", "4 rank.s. do not divide into replicas of tensor_parallel_size=3"),
        ("frozen", "stage 1 of 2 of Transformer has no parameter to train"),
        ("tied", r"_Tied\.pipeline_stages gives 2 stages that do not .*layer\.weight, layer\.bias"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_a_sentence(
    folder: Path, what: str, sentence: str
) -> None:
    for of_rank in seen(folder, "refused"):
        assert of_rank[what].startswith("ConfigurationError: ")
        assert re.search(sentence, of_rank[what]), of_rank[what]


@pytest.mark.parametrize("name", ["tabular, tensor", "tabular, pipeline"])
def test_a_broken_row_names_its_rank_and_changes_no_weight(folder: Path, name: str) -> None:
    for of_rank in seen(folder, "broken"):
        said = of_rank[name]["said"]
        assert "It comes from rank 2 (6 of its 6 rows" in said, said
        assert of_rank[name]["kept"]
