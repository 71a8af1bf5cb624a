"""An installation with an MLflow database whose schema migrations ran once."""

from tests.support.registry.builders import migrated, world

__all__ = ["migrated", "world"]  # fixtures
