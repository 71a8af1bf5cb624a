"""What a conversion chose and what it costs: goals, prices, operators, pictures of the trade."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from markupsafe import Markup

from tasks.contracts.measurement import OperatorProfile
from tasks.contracts.release import ModelVariant
from tasks.contracts.run import RunRecord
from tasks.reporting.charts import Trade, trade_chart
from tasks.reporting.quantities import decimal, is_shown, milliseconds, percent, significant

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
    memory_bytes: int | None
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
        memory_bytes=variant.memory_bytes,
        core_ms=tuple(
            f"batch {at.batch_rows:,}: {milliseconds(at.cpu_ms)}"
            for at in variant.latencies
            if is_shown(at.cpu_ms)
        ),
    )


@dataclass(frozen=True)
class OperatorRow:
    """Where the time of one form goes, in words."""

    name: str
    total: str
    operators: str


def operators(record: RunRecord) -> list[OperatorRow]:
    """Top operators of PyTorch eager, before, and of every variant that was profiled, after."""
    profiled = [v for v in record.variants if v.profile is not None]
    source = next((v.source_profile for v in profiled if v.source_profile is not None), None)
    rows = [_operators("PyTorch eager, before", source)] if source else []
    return rows + [_operators(v.name, v.profile) for v in profiled if v.profile is not None]


def _operators(name: str, profile: OperatorProfile) -> OperatorRow:
    told = ", ".join(
        f"{one.operator} {percent(one.share, 0)} ({one.calls} x)" for one in profile.operators
    )
    total = f"{milliseconds(profile.total_ms)} in a call of {profile.batch_rows:,} rows"
    return OperatorRow(name, total, told)


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


def trades(record: RunRecord) -> list[tuple[str, Markup]]:
    """Latency, and price, against the change of the metric: a caption and a picture each."""
    name = record.evaluation.overall.primary_name
    sizes = sorted({at.batch_rows for v in record.variants for at in v.latencies})
    drawn = [
        _trade(
            f"Latency of {'one row' if size == 1 else f'{size:,} rows'} against {name}",
            "median latency in ms, logarithmic",
            record.variants,
            partial(_latency_of, batch_rows=size),
            name,
        )
        for size in sizes
    ]
    unit = next((v.price.currency for v in record.variants if v.price), "")
    drawn.append(
        _trade(
            f"Price against {name}",
            f"{unit} per million rows, logarithmic",
            record.variants,
            lambda v: v.price.per_million if v.price else None,
            name,
        )
    )
    return [one for one in drawn if one is not None]


def _latency_of(variant: ModelVariant, batch_rows: int) -> float | None:
    return next((at.p50_ms for at in variant.latencies if at.batch_rows == batch_rows), None)


def _trade(
    title: str,
    x_title: str,
    variants: Sequence[ModelVariant],
    cost_of: Callable[[ModelVariant], float | None],
    metric: str,
) -> tuple[str, Markup] | None:
    points = []
    for variant in variants:
        cost, change = cost_of(variant), variant.quality_change
        if not is_shown(cost) or cost <= 0 or change is None or not is_shown(change.value):
            continue
        fate = f"chosen for {', '.join(variant.serves)}" if variant.serves else "not chosen"
        tip = (
            f"{variant.name} ({'kept' if variant.accepted else 'dropped'}, {fate}): "
            f"{significant(cost)}, {metric} {decimal(change.value, 5)}"
        )
        points.append(
            Trade(
                variant.name, cost, change.value, change.low, change.high, variant.accepted,
                bool(variant.serves), tip,
            )
        )  # fmt: skip
    if not points:
        return None
    caption = f"{title} change: left is cheaper, up is better"
    return caption, trade_chart(title, points, x_title, f"{metric} change")
