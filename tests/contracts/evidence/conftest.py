"""The installation of the registry's tests."""

from tests.contracts.registry.conftest import migrated, world

__all__ = ["migrated", "world"]  # fixtures
