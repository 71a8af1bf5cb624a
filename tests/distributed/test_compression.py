"""Compressed, local and late exchanges on real ranks, on Horovod and on torch.distributed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks.compression_ranks import ENGINES, HALF, WAYS, network
from tests.support.ranks.rank_programs import run_on_ranks

pytestmark = pytest.mark.slow

NUM_RANKS = 2
NUM_VALUES = sum(p.numel() for p in network().parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compression")
    for size in (NUM_RANKS, 1):
        run_on_ranks("tests.support.ranks.compression_ranks", path, size)
    return path


def seen(folder: Path, name: str, size: int = NUM_RANKS) -> list[Any]:
    """What each rank saw."""
    return [
        json.loads((folder / f"seen-{rank}-of-{size}.json").read_text())[name]
        for rank in range(size)
    ]


RUNS = [(way, engine) for way in WAYS for engine in ENGINES]


@pytest.mark.parametrize(("way", "engine"), RUNS)
def test_ranks_learn_and_end_with_equal_weights(folder: Path, way: str, engine: str) -> None:
    first, second = seen(folder, f"{way}, {engine}")
    assert first["checksum"] == second["checksum"]
    assert first["after"] < 0.5 * first["before"]


@pytest.mark.parametrize("way", WAYS)
def test_both_engines_learn_the_same(folder: Path, way: str) -> None:
    horovod, ddp = (seen(folder, f"{way}, {engine}")[0] for engine in ENGINES)
    assert ddp["after"] == pytest.approx(horovod["after"], rel=1e-3)
    assert ddp["checksum"] == pytest.approx(horovod["checksum"], abs=1e-3)


@pytest.mark.parametrize(("way", "engine"), RUNS)
def test_a_run_goes_on_from_its_state(folder: Path, way: str, engine: str) -> None:
    of_rank = seen(folder, f"{way}, {engine}")[0]
    assert of_rank["resumed"] == pytest.approx(of_rank["after"], rel=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_on_another_number_of_ranks(folder: Path, way: str) -> None:
    resumed = seen(folder, "resumed elsewhere", 1)[0][way]
    assert resumed < 0.5 * seen(folder, f"{way}, horovod")[0]["before"]


@pytest.mark.parametrize("engine", ENGINES)
def test_fewer_bytes_are_sent(folder: Path, engine: str) -> None:
    whole = 4 * NUM_VALUES * HALF  # two ranks send each other half of a sum, twice
    sent = {way: seen(folder, f"{way}, {engine}")[0]["sent"] for way in WAYS}
    assert sent["none"] == whole
    assert sent["fp16"] == whole // 2 + 8 * HALF
    assert sent["powersgd"] < whole / 3
    assert sent["local"] == sent["asynchronous"] == whole // 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("way", ["fp16", "powersgd"])
def test_a_broken_row_names_its_rank_and_changes_no_weight(
    folder: Path, way: str, engine: str
) -> None:
    for of_rank in seen(folder, f"{way}, {engine}, broken"):
        assert f"It comes from rank {NUM_RANKS - 1} (1 of its 16 rows" in of_rank["said"]
        assert of_rank["kept"]
