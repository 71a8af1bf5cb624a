"""The second framework: layers of Keras through the same preprocessing, export and conversion.

`make test-keras` makes an environment with Keras and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from tasks.contracts.conversion import tabular_signature
from tasks.contracts.data import DatasetSchema, category_code
from tasks.conversion.targets.onnx import MODEL_FILE, export_onnx
from tasks.conversion.targets.pytorch import load_program
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.settings import PROJECT_ROOT
from tasks.training.config import TrainingConfig
from tasks.training.core.keras_network import KerasNetwork, load_keras
from tasks.training.core.network import TabularNetwork, export_program
from tasks.training.data.preprocess import Preprocessing

pytestmark = pytest.mark.slow

HAS_KERAS = importlib.util.find_spec("keras") is not None
needs_keras = pytest.mark.skipif(
    not HAS_KERAS, reason="Keras is an optional extra; `make test-keras` installs it aside"
)
CONFIG = TrainingConfig(hidden_sizes=(16, 8), dropout=0.1, seed=3)
CODES = sorted(category_code(name) for name in ("AA", "UA", "EV"))
PREPROCESSING = Preprocessing(
    vocabularies=(np.array(CODES, dtype=np.int32), np.array([], dtype=np.int32)),
    edges=(np.array([0, 1, 4], dtype=np.float32), np.array([], dtype=np.float32)),
    flagged=(0,),
)
COLUMNS = DatasetSchema(
    row_id="row",
    event_time="moment",
    label="label",
    categorical=("carrier", "empty"),
    numeric=("delay", "flat"),
)


def rows(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw codes, numbers and a label that a network can learn."""
    rng = np.random.default_rng(seed)
    codes = rng.choice([*CODES, 5], (count, 2)).astype(np.int32)
    numbers = rng.normal(1.5, 1.5, (count, 2)).astype(np.float32)
    labels = (numbers[:, 0] + (codes[:, 0] == CODES[0]) > 2).astype(np.float32)
    numbers[rng.random((count, 2)) < 0.1] = np.nan
    return codes, numbers, labels


def trained() -> KerasNetwork:
    """A network after a few epochs of what a strategy does: plain gradients, plain AdamW."""
    codes, numbers, labels = rows(600)
    torch.manual_seed(0)
    network = KerasNetwork(PREPROCESSING, CONFIG).train()
    positions = torch.from_numpy(PREPROCESSING.category_positions(codes))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.02)
    target = torch.from_numpy(labels)
    for _ in range(60):
        optimizer.zero_grad()
        logits = network(positions, torch.from_numpy(numbers))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.4
    return network.eval()


@needs_keras
def test_it_learns_and_its_program_answers_like_it_without_keras(tmp_path: Path) -> None:
    network = trained()
    (tmp_path / "model.pt2").write_bytes(export_program(network, PREPROCESSING))  # type: ignore[arg-type]
    codes, numbers, _ = rows(50, seed=1)
    np.savez(tmp_path / "rows.npz", codes=codes, numbers=numbers)
    program = (
        "import sys; sys.modules['keras'] = None\n"
        "import numpy as np, torch\n"
        "rows = np.load('rows.npz')\n"
        "model = torch.export.load('model.pt2').module()\n"
        "scores = model(torch.from_numpy(rows['codes']), torch.from_numpy(rows['numbers']))\n"
        "np.save('scores.npy', scores.numpy())\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    with torch.no_grad():
        positions = torch.from_numpy(PREPROCESSING.category_positions(codes))
        expected = torch.sigmoid(network(positions, torch.from_numpy(numbers)))
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), expected.numpy(), atol=1e-5)


@needs_keras
def test_the_conversion_room_takes_its_program(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(export_program(trained(), PREPROCESSING))  # type: ignore[arg-type]
    signature = tabular_signature(COLUMNS)
    model = export_onnx(load_program(path), signature)
    (tmp_path / MODEL_FILE).write_bytes(model.SerializeToString())
    session = onnxruntime.InferenceSession(
        tmp_path / MODEL_FILE, providers=["CPUExecutionProvider"]
    )
    codes, numbers, _ = rows(40, seed=2)
    [scores] = session.run(None, {"categorical": codes, "numeric": numbers})
    program = torch.export.load(path).module()
    expected = program(torch.from_numpy(codes), torch.from_numpy(numbers)).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-5)


@needs_keras
def test_it_has_the_shape_of_the_other_network_and_is_seeded() -> None:
    ours = TabularNetwork(PREPROCESSING, CONFIG)
    first, second = (KerasNetwork(PREPROCESSING, CONFIG) for _ in range(2))
    sizes = sorted(tuple(sorted(p.shape)) for p in ours.parameters())
    assert sorted(tuple(sorted(p.shape)) for p in first.parameters()) == sizes
    assert list(first.state_dict()) == list(second.state_dict())
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, other)
    content = io.BytesIO()
    torch.save(first.state_dict(), content)
    content.seek(0)
    second.load_state_dict(torch.load(content, weights_only=True))


@pytest.mark.skipif(HAS_KERAS, reason="Keras is installed here")
def test_without_keras_the_sentence_says_what_to_install() -> None:
    with pytest.raises(ConfigurationError, match="install the extra `keras`"):
        load_keras()


def test_importing_the_module_does_not_import_keras() -> None:
    program = (
        "import sys; import tasks.training.core.keras_network; sys.exit('keras' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=PROJECT_ROOT)


@needs_keras
def test_two_ranks_of_keras_layers_train_one_model(tmp_path: Path) -> None:
    from tests.support.ranks.runs import config, train

    model = train(tmp_path, config(network="keras", max_epochs=2))
    assert model.num_ranks == 2
    assert model.epochs[1].validation_auc > 0.6
