"""The wheel that set-up built: the operations that training uses are right."""

from pathlib import Path

import horovod
import horovod.torch as hvd
import pytest

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.ranks.rank_programs import run_on_ranks


def test_the_wheel_is_the_projects_own_and_has_what_training_needs() -> None:
    backend = (PROJECT_ROOT / "infra/horovod/pyproject.toml").read_text()
    assert f'version = "{horovod.__version__}' in backend
    assert hvd.gloo_built()
    assert not hvd.mpi_built()


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_operations_on_every_type_agree_with_numpy(tmp_path: Path, num_ranks: int) -> None:
    run_on_ranks("tests.support.ranks.op_checks", tmp_path, num_ranks)
