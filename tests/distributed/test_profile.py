from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tasks.kernel.settings import ArtifactStore
from tests.support.ranks.runs import CONFIG, config, train


@pytest.mark.slow
def test_a_training_is_measured_diagnosed_and_profiled(tmp_path: Path) -> None:
    model = train(tmp_path, config(telemetry={"watts_per_core": 10, "profile": True}))
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
