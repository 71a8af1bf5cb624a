"""Evidence with which every gate is open, and ways to edit it."""

from datetime import UTC, datetime

import pytest

from tasks.kernel.settings import ArtifactStore
from tasks.registry.config import PromotionConfig
from tasks.registry.gates import Evidence, judge
from tasks.registry.model_folder import (
    MANIFEST_FILE,
    ModelManifest,
    VersionRecord,
    list_variants,
    write_model,
)
from tests.support.data import builders as shared
from tests.support.registry import builders

OTHER = "f" * 64
NAN = float("nan")
CONFIG = PromotionConfig()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """Evidence with which every gate is open, against a champion of another program."""
    store = ArtifactStore(tmp_path_factory.mktemp("gates"))
    dataset = shared.dataset(store, shared.frame(300))
    trained = builders.trained_model(store, dataset)
    against = (builders.comparison("champion:1", 0.002),)
    evaluation = builders.evaluation(store, trained, against=against)
    made = builders.variants(store, trained.program.sha256)
    candidate = shared.version_ref(
        trained.program.sha256, trained.snapshot_sha256, name="m", version=2, run_id="r2"
    )
    folder = store.root / "model"
    write_model(folder, trained, evaluation, dataset.snapshot, "m", "abc", store)
    manifest = ModelManifest.model_validate_json((folder / MANIFEST_FILE).read_text())
    listed = list_variants(trained.program.sha256, made)
    return Evidence(
        candidate=candidate,
        record=VersionRecord(candidate, manifest, listed, ()),
        evaluation=evaluation,
        dataset=dataset,
        variants=made,
        lost=(),
        champion=candidate.model_copy(
            update={"version": 1, "run_id": "r1", "program_sha256": OTHER}
        ),
        now=datetime(2014, 1, 31, tzinfo=UTC),
    )


def closed(evidence: Evidence, config: PromotionConfig = CONFIG) -> dict[str, str]:
    """Names and evidence of the gates that are closed."""
    return {gate.name: gate.evidence for gate in judge(evidence, config) if not gate.passed}
