import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.contracts.training import TrainedModel
from tasks.kernel.settings import ArtifactStore
from tasks.training.data.source import RowSource
from tasks.training.data.store import RowStore
from tests.support.data.builders import YEAR, frame
from tests.support.ranks.rank_programs import run_on_ranks
from tests.support.ranks.runs import config, losses, on_ranks, start_of, train
from tests.support.ranks.strategy_cases import CASES, plain_run
from tests.support.training.reading_ranks import PLAN, SHUFFLE, assert_equal, preprocessing, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine shows no CUDA device"),
]
ON_CPU = on_ranks(1)
ON_GPU = {**on_ranks(1), "device": "cuda"}
NUM_DEVICES = torch.cuda.device_count()
ON_GPUS = {**on_ranks(NUM_DEVICES), "device": "cuda"}
"""One rank on each device; with a single device the exchange is NCCL's all the same."""


def as_good_as(
    folder: Path, reference: dict[str, object], changes: dict[str, object], most: float = 1e-3
) -> TrainedModel:
    """What these changes train, once its losses were found to be those of a reference."""
    expected = train(folder / "reference", config(**reference))
    found = train(folder / "found", config(**changes))
    np.testing.assert_allclose(losses(found.epochs), losses(expected.epochs), atol=most)
    return found


def test_training_on_a_gpu_matches_the_cpus_loss(tmp_path: Path) -> None:
    as_good_as(tmp_path, ON_CPU, ON_GPU)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_over_nccl_match_the_cpus_loss(tmp_path: Path, name: str) -> None:
    found = as_good_as(tmp_path, ON_CPU, {"strategy": {"name": name}, **ON_GPUS})
    assert found.num_ranks == NUM_DEVICES


def test_horovods_ranks_exchange_over_nccl(tmp_path: Path) -> None:
    import horovod.torch as hvd

    if not hvd.nccl_built():
        pytest.skip("Horovod's wheel was built without NCCL: HOROVOD_GPU_OPERATIONS=NCCL")
    as_good_as(tmp_path, ON_CPU, ON_GPUS)


@pytest.mark.parametrize("name", ["horovod", "ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_as_well_as_full(tmp_path: Path, precision: str, name: str) -> None:
    strategy = {"name": name, "precision": precision}
    as_good_as(tmp_path, ON_GPU, {"strategy": strategy, **ON_GPU}, 0.05)


WAYS: dict[str, dict[str, object]] = {
    "compiled": {"strategy": {"compile": True}},
    "fp16 gradients": {"strategy": {"gradient_compression": "fp16"}},
    "low ranks": {"strategy": {"gradient_compression": "powersgd"}},
    "local steps": {"strategy": {"local_steps": 4}},
    "asynchronous": {"strategy": {"local_steps": 2, "asynchronous": True}},
    "elastic": {"elastic": {"enabled": True, "min_ranks": 1, "slots_per_host": 1}},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_has_the_cpus_losses(tmp_path: Path, way: str) -> None:
    on_cpu = {name: value for name, value in WAYS[way].items() if way != "compiled"}
    as_good_as(tmp_path, {**on_cpu, **ON_CPU}, {**WAYS[way], **ON_GPU})


def test_a_training_goes_on_from_the_weights_of_a_champion(tmp_path: Path) -> None:
    champion = train(tmp_path, config(**ON_GPU, max_epochs=2))
    on_cpu, on_gpu = (
        train(tmp_path, config(**on, start="champion", max_epochs=2), initial=start_of(champion))
        for on in (ON_CPU, ON_GPU)
    )
    np.testing.assert_allclose(losses(on_gpu.epochs), losses(on_cpu.epochs), atol=1e-3)


def test_a_device_tells_what_it_took_and_its_program_runs_on_the_cpu(tmp_path: Path) -> None:
    model = train(tmp_path, config(**ON_GPU, max_epochs=1))
    assert len(model.telemetry.devices) == 1
    assert model.telemetry.energy.joules
    program = torch.export.load(ArtifactStore(tmp_path / "store").path(model.program)).module()
    assert program(torch.zeros(3, 3, dtype=torch.int32), torch.zeros(3, 5)).device.type == "cpu"


def test_batches_for_a_gpu_are_in_page_locked_memory_and_hold_the_same_rows(tmp_path: Path) -> None:
    store = RowStore(tmp_path, write(tmp_path, frame(901)), YEAR, range(0, 5, 2), lambda: None)
    plain = RowSource(store, preprocessing(), SHUFFLE, PLAN)
    pinned = RowSource(store, preprocessing(), SHUFFLE, PLAN, num_threads=1, pinned=True)
    for ours, theirs in zip(pinned.batches(0), plain.batches(0), strict=True):
        assert all(part.is_pinned() for part in (*ours.inputs, ours.labels))
        assert_equal(ours, theirs)


EXACT = ("horovod", "ddp", "fsdp")
NAMES = (*EXACT, *(f"{name}, {precision}" for name in EXACT for precision in ("bf16", "fp16")))


def test_every_strategy_has_the_losses_of_one_plain_process_on_cpu(tmp_path: Path) -> None:
    """With one device its exchange is NCCL's all the same; sixteen bits are run on two."""
    size = min(2, torch.cuda.device_count())
    run_on_ranks("tests.support.ranks.strategy_ranks", tmp_path, size, "cuda", *NAMES)
    for rank in range(size):
        seen = json.loads((tmp_path / f"seen-{rank}-of-{size}.json").read_text())
        for name in NAMES:
            case = CASES[name]
            if size in case.sizes:
                tolerance = max(case.loss_tolerance, 1e-3)
                np.testing.assert_allclose(
                    seen[name]["curve"], plain_run(case).curve, rtol=tolerance
                )
