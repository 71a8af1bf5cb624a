"""Every strategy comes to what one plain process comes to, on one to three ranks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.ranks.rank_programs import run_on_ranks
from tests.support.ranks.strategy_cases import (
    CASES,
    MORE,
    NUM_STEPS,
    Case,
    global_batch,
    halves_of,
    network_of,
    plain_run,
)

# All ranks of all groups start within the first test.
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
SIZES = (2, 3, 1)
"""In this order, so that states go to larger and to smaller world sizes."""
PLAIN_STATE = "plain-half.of-1"
EXCHANGING = [case for case in CASES.values() if case.exchanges_states]
RUNS = [(case, size) for case in CASES.values() for size in case.sizes]
RUN_IDS = [f"{case.name} x{size}" for case, size in RUNS]


@dataclass(frozen=True)
class Seen:
    """What the ranks of all groups wrote down."""

    folder: Path
    by_size: dict[int, list[dict[str, Any]]]

    def of(self, name: str, size: int) -> list[Any]:
        """What each rank of a group saw of something."""
        return [seen[name] for seen in self.by_size[size]]

    def weights(self, case: Case, size: int) -> dict[str, Tensor]:
        state = torch.load(self.folder / f"{case.name}-end.of-{size}.pt", weights_only=True)
        weights: dict[str, Tensor] = state["network"]
        return weights


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("strategies")
    torch.save(plain_run(CASES["horovod"]).half_state, folder / f"{PLAIN_STATE}.pt")
    by_size = {}
    for size in SIZES:
        run_on_ranks("tests.support.ranks.strategy_ranks", folder, size, "cpu", *CASES)
        paths = [folder / f"seen-{rank}-of-{size}.json" for rank in range(size)]
        by_size[size] = [json.loads(path.read_text()) for path in paths]
    return Seen(folder, by_size)


@pytest.mark.parametrize(("case", "size"), RUNS, ids=RUN_IDS)
def test_losses_weights_and_outputs_of_all_ranks_are_those_of_one_plain_process(
    seen: Seen, case: Case, size: int
) -> None:
    ranks, plain, weights = seen.of(case.name, size), plain_run(case), seen.weights(case, size)
    assert len(ranks) == size
    assert weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        torch.testing.assert_close(weights[name], value, atol=case.weight_tolerance, rtol=0)
    outputs = outputs_of(weights)
    for of_rank in ranks:
        assert len(of_rank["curve"]) == NUM_STEPS
        np.testing.assert_allclose(of_rank["curve"], plain.curve, rtol=case.loss_tolerance)
        assert of_rank["checksum"] == ranks[0]["checksum"]
        torch.testing.assert_close(torch.tensor(of_rank["outputs"]), outputs, atol=1e-5, rtol=1e-5)


def outputs_of(weights: Mapping[str, Tensor]) -> Tensor:
    """What a plain network with these weights answers."""
    network = network_of(seed=0)
    network.load_state_dict(dict(weights))
    with torch.no_grad():
        outputs: Tensor = network.eval()(*global_batch(0).inputs)
    return outputs


@pytest.mark.parametrize(
    ("case", "size"),
    [run for run in RUNS if run[0].exchanges_states],
    ids=[f"{case.name} x{size}" for case, size in RUNS if case.exchanges_states],
)
def test_other_weights_are_judged_in_the_middle_and_training_does_not_notice(
    seen: Seen, case: Case, size: int
) -> None:
    """That the curve goes on as if nothing had been is shown with the curves above."""
    half = torch.load(seen.folder / f"{case.name}-half.of-{size}.pt", weights_only=True)
    expected = outputs_of(halves_of(half["network"]))
    for of_rank in seen.of(case.name, size):
        torch.testing.assert_close(torch.tensor(of_rank["halved"]), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", EXCHANGING, ids=lambda case: case.name)
def test_any_strategy_goes_on_from_the_state_of_any_other_on_any_world_size(
    seen: Seen, case: Case
) -> None:
    sources = {PLAIN_STATE} | {
        f"{other.name}-half.of-{size}" for other in EXCHANGING for size in other.sizes
    }
    written: set[str] = {PLAIN_STATE}
    for size in SIZES:
        written |= {f"{other.name}-half.of-{size}" for other in EXCHANGING if size in other.sizes}
        for source in written if size in case.sizes else ():
            expected = plain_run(case).curve[MORE.start : MORE.stop]
            for curve in seen.of(f"{case.name} from {source}", size):
                np.testing.assert_allclose(curve, expected, rtol=5e-5)
    assert written == sources


@pytest.mark.parametrize(
    ("way", "share"), [("sending fp16", 0.6), ("sending low ranks", 0.6), ("4 local steps", 0.45)]
)
@pytest.mark.parametrize("name", ["horovod", "ddp"])
def test_fewer_bytes_are_sent(seen: Seen, name: str, way: str, share: float) -> None:
    sent, whole = (seen.of(case, 2)[0]["wire_bytes"] for case in (f"{name}, {way}", name))
    assert 0 < sent < share * whole


@pytest.mark.parametrize("name", ["horovod", "ddp", "fsdp"])
@pytest.mark.parametrize("size", SIZES)
def test_a_broken_gradient_names_its_rank_and_changes_no_weight(
    seen: Seen, name: str, size: int
) -> None:
    for of_rank in seen.of(f"{name} broken", size):
        assert f"It comes from rank {size - 1} (1 of its 24 rows have a loss" in of_rank["said"]
        assert of_rank["kept"]


@pytest.mark.parametrize("engine", ["horovod", "torch"])
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_gives_each_rank_what_it_says(seen: Seen, engine: str, size: int) -> None:
    total = float(sum(range(size)))
    for rank, answer in enumerate(seen.of(f"exchange {engine}", size)):
        assert answer == {
            "sum_": [total + size] * 3,
            "begun": [[total] * 4, [float(size)] * 5],
            "sum": [total, 1.5 * size],
            "minimum": 5 - (size - 1),
            "from_rank_0": 7,
            "rows": [[float(r)] * 2 for r in range(size) for _ in range(r)],
            "values": [{"rank": r, "text": "x" * r} for r in range(size)],
            "broadcast": [[0.0, 0.0], 1.0, [[0.0]], [0.0] * 3, [[0.0, 0.0], [0.0, 0.0]]],
            "local": [rank, size],
        }
