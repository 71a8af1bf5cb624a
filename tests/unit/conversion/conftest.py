from tests.support.conversion.cases import case, edges, texts, threads_as_before, typical

__all__ = ["case", "edges", "texts", "threads_as_before", "typical"]  # fixtures
