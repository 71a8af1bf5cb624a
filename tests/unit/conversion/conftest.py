import pytest

from tasks.conversion.config import ConversionConfig
from tasks.kernel.settings import ArtifactStore
from tests.support.conversion.cases import (
    TextCase,
    case,
    edges,
    quick,
    text_case,
    threads_as_before,
    typical,
)

__all__ = ["case", "edges", "quick", "threads_as_before", "typical"]  # fixtures


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory, quick: ConversionConfig) -> TextCase:
    """All forms of a small encoder."""
    return text_case(ArtifactStore(tmp_path_factory.mktemp("texts") / "artifacts"), quick)
