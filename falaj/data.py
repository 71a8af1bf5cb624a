"""Commands of data: baselines, docs, where it comes from and may be, the prediction log."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from falaj.context import (
    EXIT_GATE,
    DryRun,
    End,
    Here,
    Last,
    Shown,
    Start,
    acting,
    chosen_window,
    required_window,
    row,
)
from flows.config import PipelineConfig, Suites, read_pipeline_config, suites_of
from tasks.contracts.base import TimeWindow
from tasks.contracts.data import FeatureSnapshot, TableRef
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import digest_of, scratch_folder
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder, platform_address

if TYPE_CHECKING:
    from tasks.governance.handling import Placement
    from tasks.predictions.reading import LogCount
    from tasks.validation.suites import Suite


def docs(*, context: Here) -> Shown:
    """Bring the data docs of all validations up to date.

    Examples:
        falaj docs
    """
    from tasks.validation.docs import build_site

    site = build_site(context.settings.store, context.home)
    return Shown(site, [row("Data docs", f"{site.index} with {site.num_pages} results")])


@dataclass(frozen=True)
class _Source:
    """A table that can be a baseline: its suite and its files."""

    name: str
    suite: Suite
    files: Path


def approve_baseline(
    start: Start | None = None,
    end: End | None = None,
    /,
    *,
    last: Last | None = None,
    suite: list[str] | None = None,
    reviewed: str | None = None,
    dry_run: DryRun = False,
    context: Here,
) -> Shown:
    """Profile a clean window into the baselines of the use case's suites.

    Args:
        start: First moment of the window, such as 2013-01-01T05:00Z.
        end: First moment after the window.
        last: The newest so long instead, by the use case's clock, such as 180d.
        suite: This suite only; may be repeated.
        reviewed: When and how a person reviewed the bands; signs them, and no others count then.
        dry_run: Profile, and write no file.

    Raises:
        ConfigurationError: a named suite is not of this use case, or nothing was refreshed yet.
        DataContractError: a table can be no baseline. Files written before stay.

    Examples:
        falaj baseline 2013-01-01T05:00Z 2013-07-01T05:00Z --dry-run
    """
    from tasks.validation.profiling import NOT_REVIEWED, profile_table, write_baseline
    from tasks.validation.suites import sign_baseline

    settings = context.settings
    config = read_pipeline_config(settings.feature_repo)
    window = required_window(chosen_window(start, end, last, config.clock), "baseline")
    suites = suites_of(config, settings.feature_repo)
    sources = {s.suite.suite: s for s in _sources(window, config, suites, settings)}
    wanted = suite or list(sources)
    if unknown := sorted(set(wanted) - sources.keys()):
        raise ConfigurationError(
            f"suite(s) {', '.join(unknown)} can have no baseline; this use case has "
            f"{', '.join(sources)}. Nothing was written"
        )
    lines, made = [], {}
    with scratch_folder("falaj-baseline") as scratch:
        store = ArtifactStore(scratch)
        for name in wanted:
            hand_written = sources[name].suite.model_copy(update={"baseline": None})
            table = _cut(sources[name], window, store)
            baseline = profile_table(table, hand_written, window, store, reviewed or NOT_REVIEWED)
            made[name] = baseline
            written = "not written"
            if not dry_run:
                path = write_baseline(baseline, settings.feature_repo, sources[name].suite)
                if reviewed:
                    sign_baseline(settings, config.name, name)
                written = f"{path.name} {digest_of(path)[:12]}"
            seen = f"{baseline.num_periods:>4} days, {len(baseline.bands):>3} columns"
            lines.append(f"{name:<28}{seen}, {written}")
    review = "Review the files, then say when and how: the same again with --reviewed signs them."
    return Shown(made, [*lines, "No baseline was written" if dry_run else review])


def _cut(source: _Source, window: TimeWindow, store: ArtifactStore) -> TableRef:
    """The rows of the window as a table of their own."""
    from tasks.validation.profiling import write_window

    def build(folder: StagedFolder) -> TableRef:
        target = folder.path / f"{source.name}.parquet"
        count = write_window(source.files, source.suite.profiling.time_column, window, target)
        return TableRef(name=source.name, artifact=folder.artifact(target.name), num_rows=count)

    return store.build_once("baseline", source.suite.suite, TableRef, build)


def _sources(
    window: TimeWindow, config: PipelineConfig, suites: Suites, settings: Settings
) -> Iterator[_Source]:
    from tasks.features.tables.build import published_path
    from tasks.features.tables.landing import land_raw_rows

    store = settings.store
    landed = land_raw_rows(window, config.features, settings.feature_repo, store)
    for table in landed.tables:
        yield _Source(table.name, suites.rows[table.name], store.path(table.artifact))
    folder = published_path(settings.features_home)
    for name, suite in suites.tables.items():
        if (folder / name).is_dir():
            yield _Source(name, suite, folder / name)
    if snapshot := _snapshot_with(window, store):
        yield _Source("snapshot", suites.training_set, snapshot)


def _snapshot_with(window: TimeWindow, store: ArtifactStore) -> Path | None:
    """The newest kept training set that covers the window."""
    values = [folder / "value.json" for folder in store.folders("snapshots")]
    found = sorted(values, key=lambda file: file.stat().st_mtime)
    for file in reversed(found):
        try:
            snapshot = FeatureSnapshot.model_validate_json(file.read_text())
        except ValueError:  # of another release
            continue
        if snapshot.window.contains(window):
            return store.path(snapshot.data)
    return None


predictions = App(name="predictions")


@predictions.command
def counts(
    *,
    model: str | None = None,
    start: Start | None = None,
    end: End | None = None,
    last: Last | None = None,
    context: Here,
) -> Shown:
    """Count rows by model, version, variant and deployment track.

    Args:
        model: Of this model only.
        start: First moment of arrival, such as 2026-11-01T00:00Z.
        end: First moment after the window.

    Examples:
        falaj predictions counts --last 24h
    """
    from tasks.predictions.reading import ReadTally, count_by_version

    tally = ReadTally()
    found = count_by_version(context.home, model, chosen_window(start, end, last), tally)
    lines = [count_line(count) for count in found] or ["No request is logged there."]
    return Shown({"counts": found, "damaged": tally.damaged}, [*lines, *tally.damaged])


def count_line(count: LogCount) -> str:
    """Rows of one version, variant and track, for people."""
    refused = f", {count.refused:,} refused" if count.refused else ""
    version = f"version {count.version} as {count.track} by {count.variant}"
    by = version if count.variant else f"nobody as {count.track}"
    time = f"{count.first:%F %T}Z to {count.last:%F %T}Z"
    return f"{count.model:<20} {by}: {count.answered:,} answered{refused}; {time}"


@predictions.command
def export(
    model: str,
    file: Path,
    /,
    *,
    version: list[str] | None = None,
    track: Annotated[list[str] | None, Parameter(name=["--track", "--slot"])] = None,
    labels: bool = False,
    start: Start | None = None,
    end: End | None = None,
    last: Last | None = None,
    context: Here,
) -> Shown:
    """Export a window as one Parquet or CSV file.

    Args:
        model: Registered model.
        file: Ends in .parquet or .csv.
        version: Of this version; may be repeated.
        track: Deployment track: stable, candidate or shadow; may be repeated.
        labels: With the labels known by now.
        start: First moment of arrival, such as 2026-11-01T00:00Z.
        end: First moment after the window.

    Raises:
        ConfigurationError: the file's name is wrong, or no request of the model is logged.
        StorageError: the disk refused a write.

    Examples:
        falaj predictions export flight-delay week.parquet --last 7d --labels
    """
    import pyarrow as pa

    from tasks.predictions import reading
    from tasks.predictions.labels import LABEL, JoinTally, labelled_rows
    from tasks.predictions.schema import logged_models

    home, read, joined = context.home, reading.ReadTally(), JoinTally()
    window, answered = chosen_window(start, end, last), True if labels else None
    query = reading.LogQuery(model, window, versions=version, tracks=track, answered=answered)
    known = logged_models(home)
    if model not in known and file.suffix in (".parquet", ".csv"):  # it would export no rows
        raise ConfigurationError(
            f"nothing is logged of a model {model!r}; there is {', '.join(sorted(known)) or 'none'}"
            ". Nothing was written"
        )
    schema = reading.logged_columns(home, model, window)
    rows = reading.read_rows(home, query, schema.names, tally=read)
    if labels:
        now = datetime.now(UTC)
        rows = labelled_rows(home, query, schema.names, known_by=now, tally=joined, read=read)
        schema = schema.append(pa.field(LABEL, pa.float64()))
    num_rows = reading.write_window(rows, schema, file)
    facts: dict[str, Any] = {"file": file, "rows": num_rows, "read": read}
    lines = [row("Written", f"{num_rows:,} rows to {file}"), *read.damaged]
    if labels:
        facts["labels"] = joined
        lines.append(
            f"{'Labels':<10}{joined.labelled:,} rows have one, "
            f"{joined.rows - joined.labelled:,} none; {joined.corrected:,} were corrected, "
            f"{joined.conflicting:,} contradict each other, {joined.unmatched:,} matched no row"
        )
    return Shown(facts, lines)


@predictions.command
def label(model: str, file: Path, /, *, context: Here) -> Shown:
    """Import a Parquet table of labels.

    Args:
        model: Registered model.
        file: Columns label (of several classes their names), and request_id (and request_row) or
            entity keys and event_timestamp; known_at if known.

    Raises:
        DataContractError: the table holds no labels.

    Examples:
        falaj predictions label flight-delay labels.parquet
    """
    from tasks.predictions.labels import import_labels

    config = read_pipeline_config(context.settings.feature_repo)
    is_own = config.registry.model_name == model
    classes = config.features.training_set.class_names if is_own else ()
    taken = import_labels(context.home, model, file, datetime.now(UTC), classes)
    counted = f"{taken.rows:,} by {taken.kind}, {taken.without_label:,} rows had none"
    return Shown(taken, [row("Labels", counted), row("Kept", taken.file)])


policy = App(name="policy")
NO_ADVICE = "No legal advice: each policy says at its top which articles it has, and which not."


@policy.command
def check(*, explain: bool = False, what: str = "", where: str = "", context: Here) -> Shown:
    """Show whether data may be where the configuration puts it; exit code 5 where it may not.

    Nothing is placed, and nothing is recorded.

    Args:
        explain: Show every rule that was asked, not only those that decide.
        what: Ask of this alone, such as model or backup; needs --where.
        where: Address, such as s3://bucket/prefix, https://host or pool:gpu.

    Raises:
        ConfigurationError: --what or --where is missing, or a file is wrong.
        PlacementRefusedError: the policies cannot answer.

    Examples:
        falaj policy check
        falaj policy check --explain --what model --where s3://bucket/models
    """
    from tasks.governance.handling import Placement
    from tasks.governance.policy import decisions, known_handlings

    if bool(what) != bool(where):
        raise ConfigurationError("name both --what and --where, or neither. Nothing was asked")
    handlings = known_handlings(context.settings)
    asked = [Placement(what, where)] if what else _placements(context.settings)
    found, lines = list(decisions(context.settings, asked, handlings)), []
    for each in found:
        lines.append(row("allowed" if each.allowed else "refused", each))
        lines += [row("", reason) for reason in each.reasons] if explain else []
    allowed = all(each.allowed for each in found)
    end = NO_ADVICE if handlings else "No raw table has a home: no policy was asked."
    facts = {"allowed": allowed, "decisions": found}
    return Shown(facts, [*lines, end], 0 if allowed else EXIT_GATE)


@policy.command
def waive(rule: str, /, *, what: str = "", where: str = "", context: Here) -> Shown:
    """Agree to a waiver of policy.yaml; where people sign in, it counts when two have in a day.

    Args:
        rule: As `falaj policy check` names it.
        what: Of several waivers of the rule, the one of this.
        where: Of several, the one with this pattern.

    Raises:
        AccessError: who is signed in may not approve.
        ConfigurationError: there is no such waiver, or more than one.

    Examples:
        falaj policy waive pdpl-outside --what backup
    """
    from tasks.governance.duties import agreed_by_two
    from tasks.governance.policy import Policies

    subject, policies = acting(context.settings, "approve", None), Policies(context.settings)
    asked = " ".join(filter(None, (rule, what, where)))
    named = [w for w in policies.file.waivers if w.rule == rule]
    named = [w for w in named if what in ("", w.what) and where in ("", w.where)]
    if len(named) != 1:
        raise ConfigurationError(
            f"policy.yaml has {len(named)} waivers of {asked}; expected one: write it "
            "there first, and name --what or --where of several. Nothing was changed"
        )
    agreed_by_two(context.home, subject, "waiver", named[0].about)
    fault = policies.signed(named[0]).fault(policies.today)
    line = f"does not count yet: {fault}" if fault else f"counts until {named[0].until}"
    return Shown({"waiver": named[0], "fault": fault}, [row("Waiver", f"{rule} {line}")])


def _placements(settings: Settings) -> list[Placement]:
    """All that the configuration of an installation places, by whatever file or variable."""
    from infra.gateway.config import GatewayFiles, read_plan
    from infra.platform.config import stored_config
    from infra.platform.files import PlatformFiles
    from serving.config import read_serving_config
    from tasks.governance.handling import Placement, addresses, variables
    from tasks.governance.policy import WORK

    home, config = settings.home, read_pipeline_config(settings.feature_repo)
    configs = [config, read_serving_config(settings.feature_repo)]
    configs += [stored_config(PlatformFiles(home))]
    if GatewayFiles(home).config_file.exists():
        configs.append(read_plan(home).config)
    found = [*variables(os.environ)]
    for each in configs:
        found += addresses(each, os.environ, type(each).__name__)
    if config.routing.mode == "deployments" or platform_address(home, "api_url"):
        found += [Placement(WORK, f"pool:{name}", "routing") for name in config.routing.classes]
    return found
