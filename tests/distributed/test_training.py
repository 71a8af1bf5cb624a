import gzip
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tasks.contracts.training import EpochMetrics, TrainedModel
from tasks.control.leases.placement import Grant
from tasks.control.leases.repository import applied, processes_of_lease
from tasks.kernel.guard import descendants
from tasks.kernel.settings import ArtifactStore
from tasks.training.core.objective import histogram_auc, score_histograms
from tests.support.data.builders import COLUMNS, frame, month
from tests.support.ranks.runs import CONFIG, NUM_ROWS, config, losses, on_ranks, train

SECRET = "marker-of-a-secret-3f9c1d"


@dataclass
class Trained:
    """A finished run, and what was seen of its processes while it ran."""

    folder: Path
    model: TrainedModel
    seen_epochs: list[EpochMetrics] = field(default_factory=list)
    environments: list[bytes] = field(default_factory=list)
    commands: list[bytes] = field(default_factory=list)
    listening: set[str] = field(default_factory=set)

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.folder / "store")

    @property
    def log(self) -> str:
        return self.store.path(self.model.log).read_text()


def look_at_processes(trained: Trained, work: Path) -> None:
    """Note environment, command line and listening addresses of the run's processes, and ours."""
    for pid in descendants(os.getpid()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if str(work).encode() in command:
            trained.commands.append(command)
            trained.environments.append(Path(f"/proc/{pid}/environ").read_bytes())
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                trained.listening.add(connection.laddr.ip)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("two_ranks")
    trained = Trained(folder, TrainedModel.model_construct())

    def on_epoch(metrics: EpochMetrics) -> None:
        if not trained.seen_epochs:
            look_at_processes(trained, folder / "work")
        trained.seen_epochs.append(metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_DATABASE_PASSWORD", SECRET)
        trained.model = train(folder, CONFIG, on_epoch)
    return trained


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("one_rank")
    return Trained(folder, train(folder, config(**on_ranks(1))))


def test_every_epoch_is_reported_once_and_in_order(two_ranks: Trained) -> None:
    assert two_ranks.seen_epochs == list(two_ranks.model.epochs)
    assert [metrics.epoch for metrics in two_ranks.seen_epochs] == list(range(CONFIG.max_epochs))
    best = max(two_ranks.model.epochs, key=lambda metrics: metrics.validation_auc)
    assert two_ranks.model.best_epoch == best.epoch


def test_ranks_end_each_epoch_with_equal_weights(two_ranks: Trained) -> None:
    sums = re.findall(r"rank (\d) \| DEBUG epoch (\d+): weights add up to (\S+)", two_ranks.log)
    by_rank = [[(epoch, total) for r, epoch, total in sums if r == rank] for rank in "01"]
    assert len(by_rank[0]) == CONFIG.max_epochs
    assert by_rank[0] == by_rank[1]


@pytest.mark.slow
def test_one_rank_and_two_ranks_have_the_same_loss(two_ranks: Trained, one_rank: Trained) -> None:
    np.testing.assert_allclose(
        losses(two_ranks.model.epochs), losses(one_rank.model.epochs), atol=1e-4
    )
    weights = [
        torch.load(t.store.path(t.model.checkpoint), weights_only=True)["network"]
        for t in (two_ranks, one_rank)
    ]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_the_mean_of_weights_is_judged_and_kept_and_training_does_not_notice(
    one_rank: Trained, tmp_path: Path
) -> None:
    plain = Trained(tmp_path, train(tmp_path, config(average_decay=0.0, **on_ranks(1))))
    ours, theirs = one_rank.model.epochs, plain.model.epochs
    assert [e.train_loss for e in ours] == [e.train_loss for e in theirs]
    assert ours[0].validation_loss == theirs[0].validation_loss
    assert all(
        a.validation_loss != b.validation_loss for a, b in zip(ours[1:], theirs[1:], strict=True)
    )
    assert len({t.model.checkpoint.sha256 for t in (one_rank, plain)}) == 2


def test_the_published_program_scores_raw_rows_as_well_as_it_is_said_to(two_ranks: Trained) -> None:
    rows, window = frame(NUM_ROWS), month(7, 2)
    rows = rows[(rows.event_timestamp >= window.start) & (rows.event_timestamp < window.end)]
    codes, numeric = COLUMNS.model_inputs(rows)
    program = torch.export.load(two_ranks.store.path(two_ranks.model.program)).module()
    scores = program(torch.from_numpy(codes), torch.from_numpy(numeric)).numpy()
    auc = histogram_auc(score_histograms(scores, rows["is_late"].to_numpy(np.float32)))
    best = two_ranks.model.epochs[two_ranks.model.best_epoch]
    assert auc == pytest.approx(best.validation_auc, abs=1e-4)
    assert auc > 0.65


def test_nothing_but_the_model_is_left_and_it_is_not_trained_again(two_ranks: Trained) -> None:
    left = {path.name for path in (two_ranks.folder / "work").iterdir()}
    assert left <= {"advice"}
    assert two_ranks.log.count("attempt at") == 1
    again: list[EpochMetrics] = []
    assert train(two_ranks.folder, CONFIG, again.append) == two_ranks.model
    assert again == []


def test_no_secret_reaches_a_rank_and_everything_listens_on_loopback_only(
    two_ranks: Trained,
) -> None:
    assert len(two_ranks.commands) == 2 + 2 * 2  # fork server, ranks, and a guard of each
    for text in (*two_ranks.environments, *two_ranks.commands):
        assert SECRET.encode() not in text
        assert b"FALAJ_" not in text
    assert "127.0.0.1" in two_ranks.listening
    assert two_ranks.listening <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_a_training_is_measured_diagnosed_and_profiled(tmp_path: Path) -> None:
    model = train(tmp_path, config(telemetry={"profile": True}))
    telemetry = model.telemetry
    assert telemetry.diagnosis is not None
    assert [rank.rank for rank in telemetry.ranks] == [0, 1]
    for rank in telemetry.ranks:
        assert rank.num_steps > CONFIG.max_epochs
        assert rank.rows_per_s is not None
        assert rank.busy_cores_mean is not None
        assert rank.wire_bytes > 0
        assert rank.disk_read_bytes is not None
    store = ArtifactStore(tmp_path / "store")
    kept = {artifact.uri.rpartition("/")[2]: store.path(artifact) for artifact in model.kept}
    assert set(kept) == {"trace-00000.json.gz", "trace-00001.json.gz", "horovod-timeline.json"}
    assert "NEGOTIATE_ALLREDUCE" in kept["horovod-timeline.json"].read_text()
    trace = json.loads(gzip.decompress(kept["trace-00000.json.gz"].read_bytes()))
    assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])


LEASE = "test-of-leased-cores"
LAST = max(os.sched_getaffinity(0))


@pytest.mark.slow
def test_all_processes_of_a_training_stay_on_the_leased_cores(tmp_path: Path) -> None:
    seen: dict[int, set[int]] = {}

    def look(_: EpochMetrics) -> None:
        for pid in processes_of_lease(LEASE):
            try:
                seen[pid] = os.sched_getaffinity(pid)
            except ProcessLookupError:  # it has just ended
                continue

    with applied(Grant(cores=(LAST,)), LEASE):
        model = train(tmp_path, config(max_epochs=2, patience=2), on_epoch=look)
    assert len(seen) >= 4, "two ranks and their guards"
    assert set(map(frozenset, seen.values())) == {frozenset({LAST})}
    assert model.num_ranks == 2
    assert processes_of_lease(LEASE) == []
