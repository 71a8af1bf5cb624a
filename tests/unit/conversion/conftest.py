from __future__ import annotations

from collections.abc import Iterator

import pytest

from tasks.contracts.data import ValidatedDataset
from tasks.conversion.config import ConversionConfig
from tasks.conversion.targets.pytorch import torch_threads_restored
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import case, edges, quick, typical
from tests.support.conversion.text_cases import TextCase, text_case
from tests.support.data.builders import dataset

__all__ = ["case", "edges", "quick", "typical"]  # fixtures


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    with torch_threads_restored():
        yield


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, quick: ConversionConfig) -> TextCase:
    """All forms of a small encoder."""
    return text_case(ArtifactStore(tmp_path_factory.mktemp("texts") / "artifacts"), quick)


@pytest.fixture
def rows(store: ArtifactStore) -> ValidatedDataset:
    return dataset(store)
