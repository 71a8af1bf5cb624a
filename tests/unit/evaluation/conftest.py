import pytest

from tests.support.data import builders
from tests.support.evaluation.programs import Case, LateRate


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, rows = tmp_path_factory.mktemp("evaluation"), builders.frame()
    return Case.of(folder, rows, builders.COLUMNS, LateRate(), LateRate(slope=-2.0))
