"""Which variant of a version serves on a kind of hardware, by a stated rule, from its records.

The rule, in this order: the first kept one that the configuration names; the one that the
conversion chose for the configured goal on that hardware class; where no goal matches, the kept one
with the least recorded median latency of the smallest measured calls; where nothing was measured,
the first kept one, which is the simplest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.engine.config import HardwareConfig
from tasks.contracts.release import ModelVariant
from tasks.registry.records import RegisteredVariant


@dataclass(frozen=True)
class Choice:
    """A variant and why it is that one; without a variant, why there is none."""

    reason: str
    entry: RegisteredVariant | None = None


def choose_variant(entries: Sequence[RegisteredVariant], hardware: HardwareConfig) -> Choice:
    """The variant of a version that serves on this hardware."""
    kept = [
        entry
        for entry in entries
        if entry.folder is not None and entry.variant.hardware_class == hardware.hardware_class
    ]
    if not kept:
        classes = sorted({e.variant.hardware_class for e in entries if e.folder is not None})
        return Choice(
            f"no variant was kept for hardware class {hardware.hardware_class!r} (there are some "
            f"for {', '.join(classes) or 'none'}); convert the version for it"
        )
    if hardware.variants:
        return _named(kept, hardware)
    for entry in kept:
        if hardware.goal in entry.variant.serves:
            return Choice(f"chosen for the goal {hardware.goal!r}", entry)
    timed = [entry for entry in kept if entry.variant.latencies]
    if timed:
        least = min(timed, key=lambda entry: _latency(entry.variant))
        return Choice(f"no goal {hardware.goal!r}; least recorded latency of small calls", least)
    return Choice(f"no goal {hardware.goal!r} and nothing measured; the simplest", kept[0])


def _named(kept: list[RegisteredVariant], hardware: HardwareConfig) -> Choice:
    by_name = {entry.variant.name: entry for entry in kept}
    for name in hardware.variants:
        if name in by_name:
            return Choice("named by the configuration", by_name[name])
    return Choice(
        f"the configuration asks for {', '.join(hardware.variants)} on {hardware.name!r}, kept are "
        f"{', '.join(by_name)}; name one of these, or convert again"
    )


def _latency(variant: ModelVariant) -> float:
    return min(variant.latencies, key=lambda at: at.batch_rows).p50_ms
