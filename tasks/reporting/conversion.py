"""What a conversion chose and what it costs: goals, prices, pictures of the trade."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.contracts.release import ModelVariant
from tasks.contracts.run import RunRecord
from tasks.reporting.quantities import is_shown, milliseconds, significant

NOBODY = "no variant"


@dataclass(frozen=True)
class Choice:
    """One goal on one hardware class, and what serves it."""

    goal: str
    hardware_class: str
    variant: str
    rule: str
    reason: str


def choices(record: RunRecord) -> list[Choice]:
    """For each goal and hardware class the variant that serves it; also where there is none."""
    found: dict[tuple[str, str], Choice] = {}
    for variant in record.variants:
        for standing in variant.standings:
            key = standing.goal, variant.hardware_class
            if standing.chosen:
                chosen = variant.name, standing.reason
            elif key in found:
                continue
            else:
                chosen = NOBODY, "none was kept that meets the goal and is worth it"
            found[key] = Choice(*key, chosen[0], standing.rule, chosen[1])
    return list(found.values())


@dataclass(frozen=True)
class Cost:
    """What one variant takes, as the page writes it."""

    variant: str
    rows_per_s: str
    interval: str
    streams: str
    core_seconds: str
    price: str
    core_ms: tuple[str, ...]


def costs(record: RunRecord) -> list[Cost]:
    """What was measured beside latency, of every variant that got so far."""
    return [_cost(variant) for variant in record.variants if variant.latencies]


def _cost(variant: ModelVariant) -> Cost:
    through, price = variant.throughput, variant.price
    rate = through.rows_per_s if through else None
    return Cost(
        variant=variant.name,
        rows_per_s=significant(rate.value if rate else None),
        interval=f"[{significant(rate.low)}, {significant(rate.high)}]" if rate else "",
        streams=f"{through.streams} x {through.batch_rows} rows" if through else "",
        core_seconds=significant(through.cpu_s_per_million if through else None),
        price=f"{significant(price.per_million)} {price.currency}" if price else "",
        core_ms=tuple(
            f"batch {at.batch_rows:,}: {milliseconds(at.cpu_ms)}"
            for at in variant.latencies
            if is_shown(at.cpu_ms)
        ),
    )


def priced(record: RunRecord) -> str:
    """What the prices are counted in, as a sentence; empty where there are none."""
    price = next((v.price for v in record.variants if v.price is not None), None)
    if price is None:
        return ""
    return (
        f"A core (a GPU where the hardware class is one) is counted at "
        f"{price.per_core_hour:g} {price.currency} an hour, as conversion."
        "price_per_core_hour says; machines that wait cost too, and are not counted."
    )
