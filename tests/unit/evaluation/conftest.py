import pytest

from tasks.evaluation.baseline_model import score_baseline_model
from tasks.kernel.settings import ArtifactStore
from tests.support.data import builders
from tests.support.evaluation.programs import (
    QUICK_BASELINE_MODEL,
    Case,
    LateRate,
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
        baseline_model=score_baseline_model(
            dataset, builders.splits(), QUICK_BASELINE_MODEL, store
        ),
    )
