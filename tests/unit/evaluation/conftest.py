import pytest

from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.programs import (
    Case,
    LateRate,
    quick_baseline_model,
    stored_program,
    trained_model,
)


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    store = ArtifactStore(tmp_path_factory.mktemp("evaluation") / "artifacts")
    dataset = builders.dataset(store)
    return Case(
        store=store,
        dataset=dataset,
        candidate=trained_model(stored_program(store, LateRate()).program, dataset),
        champion=stored_program(store, LateRate(slope=-2.0)),
        baseline_model=quick_baseline_model(store, dataset),
    )
