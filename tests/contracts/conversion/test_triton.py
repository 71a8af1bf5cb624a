"""Model repositories, served by a real Triton on this machine's processor.

`make test` makes an environment with Triton for these; `make test-triton` runs them alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tasks.contracts.conversion import PreparedRows
from tasks.contracts.release import RegisteredProgram, TritonRepository
from tasks.conversion.config import ConversionConfig, TritonConfig
from tasks.conversion.kinds.tabular import tabular_inputs
from tasks.conversion.kinds.text_embedding import padded
from tasks.conversion.targets.interface import LoadedModel, Runtime
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.conversion.triton.repository import write_repository
from tasks.imports.config import CorpusConfig
from tasks.imports.corpus import prepare_corpus, tokenize
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import Case, case, quick
from tests.support.conversion.programs import build_one, kept
from tests.support.data import encoders
from tests.support.data.builders import COLUMNS, frame
from tests.support.services.triton_server import needs_triton, serving

pytestmark = pytest.mark.slow

__all__ = ["case", "quick"]  # fixtures
# Triton's Python backend stalls at times, for half a second; nobody is to be refused for that.
PYTHON_BACKEND = TritonConfig(
    onnx_backend="python", max_batch_rows=64, max_wait_us=20_000, timeout_ms=60_000
)


def loaded(program: RegisteredProgram, store: ArtifactStore) -> LoadedModel:
    return load_pytorch(store.path(program.program), program.signature, Runtime())


@needs_triton
def test_a_table_is_served_in_batches_as_pytorch_answers(case: Case, tmp_path: Path) -> None:
    config = case.config.model_copy(update={"triton": PYTHON_BACKEND})
    form = kept(case.onnx, case.program)
    written = write_repository(case.program, form, case.rows, config, case.store)
    inputs = tabular_inputs(*COLUMNS.model_inputs(frame(96, seed=5)))
    expected = loaded(case.program, case.store)(inputs)
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


@pytest.fixture(scope="module")
def texts(
    tmp_path_factory: pytest.TempPathFactory, quick: ConversionConfig
) -> tuple[ArtifactStore, RegisteredProgram, PreparedRows, TritonRepository]:
    """A small encoder behind the tokenizer that made its rows."""
    scratch = tmp_path_factory.mktemp("texts")
    store = ArtifactStore(scratch / "artifacts")
    program = encoders.registered(store, "encoder")
    (scratch / "texts.txt").write_text("\n".join(encoders.texts(60)))
    corpus = CorpusConfig(file=scratch / "texts.txt", judged_texts=32)
    rows = prepare_corpus(corpus, encoders.write_encoder(scratch / "encoder"), store)
    config = quick.model_copy(update={"triton": PYTHON_BACKEND})
    onnx = build_one("onnx-fp32", program, rows, config, store)
    written = write_repository(program, kept(onnx, program), rows, config, store)
    return store, program, rows, written


@needs_triton
def test_texts_are_served_as_they_are(
    texts: tuple[ArtifactStore, RegisteredProgram, PreparedRows, TritonRepository], tmp_path: Path
) -> None:
    store, program, rows, written = texts
    assert written.models == ("encoder-tokenizer", "encoder-model", "encoder")
    sentences = [*encoders.texts(9, seed=3), "", "the " * 50, "unheard-of words: naïve, 走る"]
    assert rows.tokenizer is not None
    ids = tokenize(sentences, store.path(rows.tokenizer), encoders.MOST_TOKENS)
    expected = loaded(program, store)(padded([np.array(tokens) for tokens in ids]))

    def question(*chosen: str) -> dict[str, object]:
        inputs = {"text": ["BYTES", [[text] for text in chosen]]}
        return {"model": written.model, "inputs": inputs, "output": program.signature.output.name}

    with serving(store.path(written.files), tmp_path) as server:
        together, *single = server.ask(question(*sentences), *map(question, sentences))
    assert together["shape"] == list(expected.shape)
    got = np.reshape(together["values"], expected.shape)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose([one["values"] for one in single], expected, atol=1e-5)
