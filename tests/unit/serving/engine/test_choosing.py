"""Which variant serves: by name, by goal, else the simplest."""

from typing import Any

import pytest

from serving.config import HardwareConfig
from serving.engine.loading import choose_variant
from tasks.contracts.base import Artifact
from tasks.contracts.conversion import GoalResult
from tasks.kernel.errors import RegistryError
from tasks.registry.model_folder import RegisteredVariant
from tests.support.data.builders import variant


def entry(name: str, goal: str = "", **changes: Any) -> RegisteredVariant:
    standing = GoalResult(
        goal=goal or "other", rule="", figure=None, unit="ms", chosen=bool(goal), reason=""
    )
    files = Artifact(uri="artifact:x", sha256="0" * 64, num_bytes=1)
    folder = changes.pop("folder", f"variants/{name}")
    made = variant("0" * 64, files, name=name, standings=(standing,), **changes)
    return RegisteredVariant(variant=made, folder=folder)


@pytest.mark.parametrize(
    ("entries", "hardware", "name", "words"),
    [
        ([entry("a"), entry("b", "one-row")], {}, "b", "chosen for the goal 'one-row'"),
        ([entry("a"), entry("b")], {}, "a", "the simplest"),
        ([entry("a", "bulk"), entry("b", "one-row")], {"goal": "bulk"}, "a", "goal 'bulk'"),
        (
            [entry("a"), entry("b", "one-row")],
            {"variants": ("x", "a")},
            "a",
            "named by the configuration",
        ),
        ([entry("a")], {"variants": ("x",)}, None, "asks for x on 'cpu', kept are a"),
        ([entry("a", folder=None)], {}, None, "no variant was kept for hardware class 'cpu'"),
        ([entry("a")], {"hardware_class": "gpu"}, None, "there are some for cpu"),
        ([], {}, None, "there are some for none"),
    ],
)
def test_the_variant_follows_from_the_records(
    entries: list[RegisteredVariant], hardware: dict[str, Any], name: str | None, words: str
) -> None:
    if name is None:
        with pytest.raises(RegistryError, match=words):
            choose_variant(entries, HardwareConfig(**hardware))
        return
    chosen, reason = choose_variant(entries, HardwareConfig(**hardware))
    assert chosen.variant.name == name
    assert words in reason
