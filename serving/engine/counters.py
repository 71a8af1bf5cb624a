"""What an engine counts, as samples that any metrics system can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from serving.engine.backends import Backend
from serving.engine.dispatch import Dispatcher
from serving.engine.slots import ServedVersions
from serving.engine.versions import LoadedVersion


class Sample(NamedTuple):
    """One number. Counters only grow while a version is loaded; gauges go up and down."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: Mapping[str, str]
    value: float


def samples(models: Iterable[ServedVersions], dispatcher: Dispatcher) -> list[Sample]:
    """Everything that is counted now."""
    found = [
        Sample("queued_requests_total", "gauge", {}, dispatcher.requests),
        Sample("queued_rows_total", "gauge", {}, dispatcher.rows),
        Sample("lost_outcomes", "counter", {}, dispatcher.outcomes.num_lost),
        Sample("unseen_outcomes", "counter", {}, dispatcher.outcomes.num_unseen),
    ]
    for (model, slot, reason), count in dispatcher.outcomes.refused.items():
        labels = {"model": model, "slot": slot, "reason": reason}
        found.append(Sample("refused", "counter", labels, count))
    for state in models:
        found += _of_model(state)
    return found


def _of_model(state: ServedVersions) -> Iterator[Sample]:
    labels = {"model": state.name}
    yield Sample("loaded_versions", "gauge", labels, len(state.versions))
    yield Sample("failed_loads", "gauge", labels, len(state.failures))
    yield Sample("passed_on", "counter", labels, state.passed_on)
    for slot, lane in state.lanes.items():
        here = {**labels, "slot": slot, "version": lane.version.version}
        yield Sample("queued_requests", "gauge", here, len(lane.entries))
        yield Sample("queued_rows", "gauge", here, lane.rows)
        yield Sample("spilling", "gauge", here, lane.load.spilling)
        yield Sample("spilled", "counter", here, lane.load.times_spilled)
    for version in state.versions.values():
        yield Sample(
            "missing_backends", "gauge", {**labels, "version": version.version},
            len(version.troubles),
        )  # fmt: skip
        for backend in version.backends:
            yield from _of_backend(version, backend)


def _of_backend(version: LoadedVersion, backend: Backend) -> Iterator[Sample]:
    labels = {
        "model": version.model,
        "version": version.version,
        "variant": backend.variant,
        "hardware": backend.hardware,
    }
    yield Sample("backend_closed", "gauge", labels, backend.circuit.closed)
    yield Sample("backend_opened", "counter", labels, backend.circuit.times_opened)
    yield Sample("backend_failures", "counter", labels, backend.failures)
    for tally in backend.tallies.values():
        here = {
            **labels,
            "slot": tally.served.slot,
            "fell_over_from": tally.served.fell_over_from,
        }
        yield Sample("answered", "counter", here, tally.calls)
        yield Sample("answered_rows", "counter", here, tally.rows)
        yield Sample("batches", "counter", here, tally.batches)
        yield Sample("compute_seconds", "counter", here, tally.seconds)
