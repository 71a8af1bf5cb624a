"""Command of the ledger: what runs took and cost, and what is ahead."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from falaj.context import Context, Here, Last, Shown, row
from falaj.platform import platform_files
from tasks.contracts.hardware import CPU, GPU, kind_of, read_classes
from tasks.contracts.telemetry import ResourceUse
from tasks.costs.forecast import MIN_DAYS, MOST_DAYS, by_day, days_until_full, mean_wait, month_cost
from tasks.costs.ledger import CostLedger, Entry
from tasks.kernel.settings import Settings

By = Literal["model", "use-case", "owner", "stage", "class", "day", "run"]
KEYS: dict[By, Callable[[Entry], str]] = {
    "model": lambda e: e.model,
    "use-case": lambda e: e.use_case,
    "owner": lambda e: e.owner,
    "stage": lambda e: e.flow,
    "class": lambda e: e.hardware_class,
    "day": lambda e: f"{e.started:%Y-%m-%d}",
    "run": lambda e: e.root_id,
}
GIB, KWH, KINDS = 2**30, 3.6e6, (CPU, GPU)


def costs(
    *, last: Last = timedelta(days=30), by: By = "stage", trace: Path | None = None, context: Here
) -> Shown:
    """Show what runs took and cost, and forecast disk, queue and money.

    Args:
        by: What a line of the table is about.
        trace: CSV of prices and evictions (moment, class, price, evicted): what the same trainings
            would have cost on demand and on spot hosts.

    Raises:
        TransientError: the database does not answer.
        DataContractError: the trace cannot be read.

    Examples:
        falaj costs
        falaj costs --last 90d --by model --json
        falaj costs --trace prices.csv
    """
    now = datetime.now(UTC)
    longest = now - max(last, timedelta(days=MOST_DAYS + 31))
    known = CostLedger(context.settings.metadata_url).entries(longest)
    sums = _sums([entry for entry in known if entry.started >= now - last], KEYS[by])
    forecasts = {"disk": disk_forecast(context.settings, now), "month": _month(known, now)}
    forecasts["queue"] = _queue(context, now)
    lines = [*_table(by, sums), "", *(row(n.capitalize(), f["text"]) for n, f in forecasts.items())]
    lines.append(row("Prices", _prices(context.home)))
    if trace is not None:
        compared = list(compare_spot(known, trace, context.settings))
        forecasts["spot"] = {"text": "; ".join(each["text"] for each in compared)}
        lines += [row("Spot", each["text"]) for each in compared]
    lines += [row("CPU, GPU", text) for text in compare_kinds(known)]
    facts: dict[str, Any] = {"by": by, "since": now - last, "sums": sums, "forecasts": forecasts}
    return Shown(facts, lines)


def _sums(entries: Iterable[Entry], key: Callable[[Entry], str]) -> dict[str, ResourceUse]:
    """Sums by key; money of two currencies is not added, so each has a line of its own."""
    found: dict[str, ResourceUse] = {}
    first: str | None = None
    for entry in entries:
        first = first or entry.use.currency
        name = key(entry) or "-"
        name += f" ({entry.use.currency})" * (entry.use.currency != first)
        found[name] = found[name] + entry.use if name in found else entry.use
    return found


def _table(by: By, sums: dict[str, ResourceUse]) -> Iterator[str]:
    if not sums:
        yield "no run is in the ledger; `falaj run` makes one"
        return
    size = max(map(len, [by, *sums]))
    yield f"{by:<{size}} {'seconds':>10} {'CPU s':>10} {'GPU s':>10} {'kWh':>10} {'money':>14}"
    uses = [*sums.values()]
    total = sum(uses[1:], uses[0]) if len({use.currency for use in uses}) == 1 else None
    for name, use in [*sums.items(), *([("total", total)] if total else [])]:
        kwh = f"{(use.joules or 0.0) / KWH:.4f}{'~' if use.estimated else ' '}"
        money = f"{use.amount or 0.0:.4f} {use.currency}"
        times = f"{use.seconds:>10.1f} {use.cpu_s:>10.1f} {use.gpu_s:>10.1f}"
        yield f"{name:<{size}} {times} {kwh:>10} {money:>14}"
    if any(use.estimated for use in uses):
        yield "~ estimated by stated watts, at least in part: no meter could be read"


def disk_forecast(settings: Settings, now: datetime) -> dict[str, Any]:
    """When the disk of the state is full, by the builds that are there and the days they are of."""
    from tasks.state.prune import sizes_of_builds

    sizes = sizes_of_builds(settings)
    total, free = sum(size for _, size in sizes), shutil.disk_usage(settings.home).free
    growth = by_day([(moment, float(size)) for moment, size in sizes], now)
    full = days_until_full(growth, free) if settings.location is None else None
    text = f"builds of {total / GIB:.2f} GiB"
    if settings.location is not None:
        text += f" in {settings.location.url}, which has no end of its own"
    text += f"; {free / GIB:.1f} GiB are free in {settings.home}"
    if full is not None:
        between = f"{_days(full.low)} to {_days(full.high)}"
        text += f"; full in {_days(full.value)} days (95 %: {between})"
    elif settings.location is None:
        text += f"; {len(growth)} complete days of builds are too few to forecast ({MIN_DAYS})"
    days = full and full._asdict()
    return {"text": text, "bytes": total, "free_bytes": free, "days_until_full": days}


def _days(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "no number of"


def _month(entries: list[Entry], now: datetime) -> dict[str, Any]:
    currencies = sorted({entry.use.currency for entry in entries})
    if len(currencies) > 1:
        return {"text": f"not forecast: prices are in {', '.join(currencies)}"}
    amounts = [(entry.started, entry.use.amount or 0.0) for entry in entries]
    found = month_cost(amounts, now)
    if found is None:
        num_days = len(by_day(amounts, now))
        return {"text": f"{num_days} complete days of runs are too few to forecast ({MIN_DAYS})"}
    text = f"{now:%Y-%m} costs {found.value:.2f} {currencies[0]} (95 %: {found.low:.2f} to "
    return {"text": f"{text}{found.high:.2f})", "cost": found._asdict(), "currency": currencies[0]}


def _queue(context: Context, now: datetime) -> dict[str, Any]:
    """How long runs of the platform waited for their start; nothing is asked where none runs."""
    from infra.orchestration.client import is_running, read_password
    from infra.platform.api import PrefectApi
    from infra.platform.files import read_endpoint

    files = platform_files(context)
    endpoint = read_endpoint(files) if is_running(context.home) else None
    if endpoint is None:
        return {"text": "no platform runs here, so no run waits in a queue"}
    api = PrefectApi(endpoint.api_url, read_password(files.folder))
    since = {"after_": (now - timedelta(days=MOST_DAYS)).isoformat()}
    runs = api.runs(["COMPLETED", "FAILED", "CRASHED", "RUNNING"], start_time=since)
    waits = [
        (datetime.fromisoformat(str(run["start_time"])), float(run["estimated_start_time_delta"]))
        for run in runs
        if run.get("deployment_id")
    ]
    late = len(api.runs(["SCHEDULED"], expected_start_time={"before_": now.isoformat()}))
    found = mean_wait(waits, now)
    if found is None:
        text = f"fewer than {MIN_DAYS} days of runs are too few to forecast a wait"
    else:
        text = f"a run waits {found.value:.1f} s (95 %: {found.low:.1f} to {found.high:.1f})"
    text, wait_s = f"{text}; {late} runs are late now", found and found._asdict()
    return {"text": text, "wait_s": wait_s, "late": late}


def compare_spot(known: list[Entry], trace: Path, settings: Settings) -> Iterator[dict[str, Any]]:
    """The recorded trainings as they were, and on spot hosts; results do not depend on the host."""
    from flows.config import read_pipeline_config
    from tasks.costs.trace import read_trace, replay

    rows = read_trace(trace)
    every_s = read_pipeline_config(settings.feature_repo).training.checkpoints.every_s
    for name in dict.fromkeys(each.hardware_class for each in rows):
        uses = [e.use for e in _trainings(known) if e.hardware_class == name]
        found = replay(uses, [each for each in rows if each.hardware_class == name], every_s)
        text = f"{name}: no recorded training of this class fits into the trace"
        if found is not None:
            amount, hours = sum(u.amount or 0.0 for u in uses), sum(u.seconds for u in uses) / 3600
            text = (
                f"{name}: {len(uses)} trainings cost {amount:.4f} in {hours:.2f} h on demand, "
                f"{found.amount:.4f} (95 % of starts: {found.low:.4f} to {found.high:.4f}) in "
                f"{found.hours:.2f} h on spot hosts; quality is not compared"
            )
        yield {"class": name, "text": text, "spot": found and found._asdict()}


def compare_kinds(known: list[Entry]) -> Iterator[str]:
    """Seconds and money of a model's trainings on processors and on GPUs, where both are known."""
    trainings = list(_trainings(known))
    for model in sorted({entry.model for entry in trainings}):
        own = [entry for entry in trainings if entry.model == model]
        of = {kind: [e.use for e in own if kind_of(e.hardware_class) == kind] for kind in KINDS}
        if all(of.values()):
            yield f"{model}: " + "; ".join(
                f"{len(uses)} trainings on {kind}, in the mean "
                f"{sum(u.seconds for u in uses) / len(uses):.1f} s and "
                f"{sum(u.amount or 0.0 for u in uses) / len(uses):.4f} {uses[0].currency}"
                for kind, uses in of.items()
            )


def _trainings(known: list[Entry]) -> Iterator[Entry]:
    return (e for e in known if (e.flow, e.state) == ("training", "completed") and e.use.seconds)


def _prices(home: Path) -> str:
    classes = read_classes(home)
    guessed = [name for name, found in classes.items() if not found.prices.model_fields_set]
    if not guessed:
        return "of hardware.yaml"
    return f"estimates for {', '.join(guessed)}; set `prices` of these classes in hardware.yaml"
