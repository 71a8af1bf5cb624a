"""Model repositories, served by a real Triton on this machine's processor.

`make test` makes an environment with Triton for these; `make test-triton` runs them alone.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.conversion.config import TritonConfig
from tasks.conversion.kinds.tabular import tabular_inputs
from tasks.conversion.triton.repository import write_repository
from tests.support.conversion.cases import Case, case
from tests.support.conversion.programs import kept
from tests.support.data.builders import COLUMNS, frame
from tests.support.services.triton_server import needs_triton, serving

pytestmark = pytest.mark.slow

__all__ = ["case"]  # fixtures
# Triton's Python backend stalls at times, for half a second; nobody is to be refused for that.
PYTHON_BACKEND = TritonConfig(
    onnx_backend="python", max_batch_rows=64, max_wait_us=20_000, timeout_ms=60_000
)


@needs_triton
def test_a_table_is_served_in_batches_as_pytorch_answers(case: Case, tmp_path: Path) -> None:
    job = replace(case, config=case.config.model_copy(update={"triton": PYTHON_BACKEND}))
    form = kept(case.onnx, case.program)
    written = write_repository(job, form)
    inputs = tabular_inputs(*COLUMNS.model_inputs(frame(96, seed=5)))
    expected = case.load_source()(inputs)
    calls = [(n, 3) for n in range(0, 90, 3)] + [(90, 1)]

    def question(start: int, rows: int) -> dict[str, object]:
        block = inputs.block(start, start + rows)
        types = {"categorical": "INT32", "numeric": "FP32"}
        told = {name: [types[name], block[name].tolist()] for name in block}
        return {"model": written.model, "inputs": told, "output": "score"}

    with serving(case.store.path(written.files), tmp_path) as server:
        warm = server.get(f"models/{written.model}/stats")["model_stats"][0]
        answers = server.ask(*[question(*call) for call in calls])
        stats = server.get(f"models/{written.model}/stats")["model_stats"][0]
        narrow = {"categorical": ["INT32", [[1]]], "numeric": ["FP32", [[1.0]]]}
        wrong, large = server.ask({**question(0, 1), "inputs": narrow}, question(0, 96))
        told = server.get(f"models/{written.model}/config")
    for (start, rows), answer in zip(calls, answers, strict=True):
        assert answer["shape"] == [rows, 1]  # Triton knows no tensor without an axis of its own
        np.testing.assert_allclose(answer["values"], expected[start : start + rows], atol=1e-6)
    assert "unexpected shape for input" in wrong["error"]
    assert "batch-size must be <= 64" in large["error"]
    assert [w["name"] for w in told["model_warmup"]] == ["rows_1", "rows_32"]
    assert told["version_policy"] == {"specific": {"versions": [case.program.version.version]}}
    assert warm["inference_count"] == 1 + 32  # rows that warmed it up
    assert stats["inference_count"] - warm["inference_count"] == 30 * 3 + 1
    executions = stats["execution_count"] - warm["execution_count"]
    assert executions < len(calls)  # several requests in one
    assert told["parameters"]["falaj.program_sha256"]["string_value"] == form.source_sha256
