"""What the registry, the lineage and the reports must hold of a smaller network."""

from __future__ import annotations

from pathlib import Path

from tasks.contracts.run import RunRecord
from tasks.kernel.settings import Settings
from tasks.lineage.journal import Journal
from tasks.lineage.trace import trace
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import CANDIDATE, Registry
from tasks.registry.model_folder import read_version


def check_smaller_version(parent: RunRecord, home: Path) -> int:
    """Check the candidate, which was pruned from the run's model and distilled by it.

    Args:
        parent: the run whose version was made smaller.
        home: its state folder.

    Returns:
        The candidate's number.
    """
    name, version = parent.version.name, parent.version
    settings = Settings.from_environment({"FALAJ_HOME": str(home)})
    made = Registry(RegistryLocation.of(settings)).by_alias(name, CANDIDATE)
    assert made is not None
    assert made.tags["compressed_from"] == str(version.version)
    assert "promotion" in made.tags  # promoted or refused, by the gates of every candidate

    record = read_version(made)
    assert not record.damage
    assert record.manifest is not None
    assert record.manifest.compression is not None
    assert record.manifest.compression.parent == version
    assert record.manifest.started_from is not None
    assert record.manifest.started_from.version == version
    assert record.manifest.splits == parent.model.splits

    assert record.variants is not None
    variants = [entry.variant for entry in record.variants.variants]
    assert {v.name for v in variants} == {v.name for v in parent.variants}
    assert any(variant.accepted for variant in variants)

    chain = trace(f"models/{name}/{made.number}", Journal(home / "lineage"))
    assert f"models/{name}/{version.version}" in {origin.data.name for origin in chain}
    (page,) = (home / "reports").glob("compression-*/compression.md")
    assert "small, control" in page.read_text()
    return made.number
