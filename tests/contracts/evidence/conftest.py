"""The installation of the registry's tests."""

from tests.support.registry.builders import migrated, world

__all__ = ["migrated", "world"]  # fixtures
