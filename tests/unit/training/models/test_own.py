"""Modules of a user's: what is found, what is refused, and with which words."""

from pathlib import Path

import pytest
import torch

from tasks.kernel.errors import ConfigurationError
from tasks.training.config import TrainingConfig
from tasks.training.core.objective import Classification
from tasks.training.models.own import check_module, own_losses
from tasks.training.models.source import check_source, source_digest
from tests.support.training.reading_ranks import training_job

LINEAR = """
import torch
from torch import nn

class Linear(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 1) for size in columns.table_sizes)
        self.weights = nn.Linear(len(columns.numeric), 1)

    def forward(self, positions, numeric):
        known = sum(table(positions[:, k]).squeeze(1) for k, table in enumerate(self.tables))
        return self.weights(torch.nan_to_num(numeric)).squeeze(1) + known

def build(columns, config):
    return Linear(columns)
"""


def written(folder: Path, name: str, code: str) -> str:
    """A module of this name in a project folder, with a function `build`."""
    (folder / f"{name}.py").write_text(code)
    return f"{name}:build"


def checked(folder: Path, model: str) -> None:
    check_source(model, folder)
    check_module(training_job(config=TrainingConfig(model=model), project=folder))


def test_a_module_beside_the_use_case_is_found_built_and_exported(tmp_path: Path) -> None:
    checked(tmp_path, written(tmp_path, "linear_one", LINEAR))


def test_a_name_that_leads_nowhere_is_refused_without_running_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no Python module 'nowhere'.*write nowhere\.py"):
        check_source("nowhere:build", tmp_path)
    raising = written(tmp_path, "raising_one", "raise SystemExit(3)\ndef make(c, d): ...\n")
    with pytest.raises(ConfigurationError, match=r"binds no such name; it has .*make"):
        check_source(raising, tmp_path)
    check_source("raising_one:make", tmp_path)
    broken = written(tmp_path, "broken_one", "def build(:\n")
    with pytest.raises(ConfigurationError, match=r"broken_one\.py, line 1: "):
        check_source(broken, tmp_path)


@pytest.mark.parametrize("signature", ["columns", "a, b, c", "*, columns, config"])
def test_a_function_of_other_arguments_is_refused(tmp_path: Path, signature: str) -> None:
    model = written(tmp_path, "signed", f"def build({signature}):\n    return None\n")
    with pytest.raises(
        ConfigurationError, match=r"line 1: build takes .* build\(columns, config\)"
    ):
        check_source(model, tmp_path)


FAULTS = {
    "gives a list": ("def build(c, d):\n    return []\n", "gave a list, expected a torch.nn.Mod"),
    "fails": ("def build(c, d):\n    return 1 / 0\n", "line 2\\): ZeroDivisionError"),
    "gives a matrix": (LINEAR.replace("numeric)).squeeze(1)", "numeric))"), r"shape \(3, 3\)"),
    "does not fill": (LINEAR.replace("torch.nan_to_num(numeric)", "numeric"), "gives nan for a"),
    "branches": (
        LINEAR.replace("        known =", "        if numeric[0, 1] > 0: numeric = numeric * 2\n"
        "        known ="),
        "exporting the module of .* with torch.export failed",
    ),
    "wrong loss": (
        LINEAR + "Linear.loss = lambda self, outputs, labels: (outputs - labels).mean()\n",
        r"the losses of the module of .* have shape \(\) for 3 rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_module_that_cannot_serve_is_refused_before_rows_are_read(
    tmp_path: Path, fault: str
) -> None:
    code, sentence = FAULTS[fault]
    name = f"fault_{'_'.join(fault.split())}"
    with pytest.raises(ConfigurationError, match=sentence):
        checked(tmp_path, written(tmp_path, name, code))


def test_a_change_of_any_file_beside_it_makes_another_model(tmp_path: Path) -> None:
    model = written(tmp_path, "digested", LINEAR)
    before = source_digest(model, tmp_path)
    (tmp_path / "helper.py").write_text("RATE = 1\n")
    assert source_digest(model, tmp_path) != before
    package = tmp_path / "whole"
    package.mkdir()
    (package / "__init__.py").write_text("from .parts import build\n")
    (package / "parts.py").write_text(LINEAR)
    check_source("whole:build", tmp_path)
    before = source_digest("whole.parts:build", tmp_path)
    (package / "parts.py").write_text(LINEAR + "\n# changed\n")
    assert source_digest("whole.parts:build", tmp_path) != before


def test_a_loss_of_its_own_takes_the_place_of_cross_entropy() -> None:
    class Mean(torch.nn.Module):
        def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return (outputs - labels).abs()

    losses = own_losses(Mean(), Classification())
    assert losses(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 1.0])).tolist() == [1.0, 1.0]
    plain = own_losses(torch.nn.Linear(1, 1), Classification())
    assert plain(torch.zeros(1), torch.ones(1)).item() == pytest.approx(0.6931, abs=1e-3)
