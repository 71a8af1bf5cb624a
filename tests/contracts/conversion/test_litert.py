"""LiteRT, for small devices: converted in an environment of its own, run beside the other runtimes.

`make test-litert` makes the converter's environment and runs these.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.contracts.release import BuiltVariant
from tasks.conversion.convert import judge_variants
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.targets.catalog import format_of
from tasks.conversion.targets.interface import ModelInputs, Runtime, load_files
from tasks.conversion.targets.litert import MODEL_FILE, equipment, refuse_other_axes
from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import ArtifactStore, tool_python
from tests.support.conversion.cases import Case, case, edges, quick, typical
from tests.support.conversion.programs import Elementwise, build_one, exported, registered
from tests.support.data import encoders

__all__ = ["case", "edges", "quick", "typical"]  # fixtures
LITERT = format_of("litert-fp32")
HAS_RUNTIME = importlib.util.find_spec("ai_edge_litert") is not None
needs_litert = pytest.mark.skipif(
    tool_python("litert") is None or not HAS_RUNTIME,
    reason="LiteRT's converter has an environment of its own: `make test-litert`",
)
# Its converter takes half a minute to be imported.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def litert(case: Case) -> BuiltVariant:
    return build_one("litert-fp32", case.program, case.rows, case.config, case.store)


@needs_litert
def test_it_answers_like_pytorch_in_calls_of_any_size(
    case: Case, litert: BuiltVariant, typical: ModelInputs, edges: ModelInputs
) -> None:
    assert litert.files is not None, litert.failure
    model, source = case.load(litert), case.load_source()
    assert model.settings["rows_of_calls"] == "1, 32"
    bound = TABULAR.bounds["fp32"].max_gap
    for rows in (1, 2, 31, 32, 33, 97):
        block = typical.block(0, rows)
        np.testing.assert_allclose(model(block), source(block), atol=bound)
    np.testing.assert_allclose(model(edges), source(edges), atol=bound)
    assert model(typical.block(0, 0)).shape == (0,)


@needs_litert
def test_the_judge_takes_it_like_any_other_form(case: Case, litert: BuiltVariant) -> None:
    config = case.config.model_copy(update={"formats": ("onnx-fp32", "litert-fp32")})
    forms = (case.onnx, litert)
    variant = judge_variants(case.program, forms, case.rows, config, case.store)[-1]
    assert variant.name == "litert-fp32"
    assert [at.batch_rows for at in variant.latencies] == [1, 8]
    assert variant.settings["litert-torch"]
    assert variant.settings["runtime"].startswith("litert ")


@needs_litert
def test_an_operator_that_it_lacks_is_told_and_nothing_is_left(case: Case, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    program = registered(store, case.dataset, exported(Elementwise(torch.special.i0)))
    odd = build_one("litert-fp32", program, case.rows, case.config, store)
    assert odd.files is None
    assert "LiteRT cannot take the program: " in str(odd.failure)
    assert list(store.root.rglob(MODEL_FILE)) == []


@needs_litert
def test_a_damaged_file_is_refused_with_a_sentence(
    case: Case, litert: BuiltVariant, tmp_path: Path
) -> None:
    assert litert.files is not None, litert.failure
    (tmp_path / MODEL_FILE).write_bytes(b"no model")
    with pytest.raises(ConversionError, match="LiteRT cannot load the model"):
        load_files("litert-fp32", tmp_path, case.program.signature, Runtime())


def test_rows_of_any_length_are_refused_with_a_sentence(tmp_path: Path) -> None:
    program = encoders.registered(ArtifactStore(tmp_path / "artifacts"), "encoder")
    with pytest.raises(ConversionError, match="the axes seq take any length, and LiteRT's file"):
        refuse_other_axes(program.signature)


def test_without_its_environment_the_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FALAJ_LITERT_PYTHON", str(tmp_path / "python"))
    with pytest.raises(ConversionError, match=r"`make test-litert` makes it, or name its interpr"):
        equipment()


@pytest.mark.skipif(
    importlib.util.find_spec("litert_torch") is not None, reason="the converter is here"
)
def test_an_environment_without_the_converter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_LITERT_PYTHON", sys.executable)
    with pytest.raises(ConversionError, match=r"has no LiteRT converter: .*litert-torch"):
        equipment()


def test_what_this_machine_lacks_is_no_result_that_is_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FALAJ_LITERT_PYTHON", str(tmp_path / "python"))
    builds = case.store.num_builds
    form = build_one("litert-fp32", case.program, case.rows, case.config, case.store)
    assert "the LiteRT converter has an environment of its own" in str(form.failure)
    assert case.store.num_builds == builds
    assert LITERT.is_for("cpu-arm")
