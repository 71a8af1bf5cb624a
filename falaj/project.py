"""A project in Python: rows in and out as DataFrames; a notebook shows what is worth looking at.

Runs go through the command line in a process of their own, which starts Prefect and ends it: an
interpreter that has imported Prefect cannot be given another server.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from falaj.models import existing_registry, open_registry, version_facts
from flows.config import PipelineConfig, read_pipeline_config
from tasks.contracts.evaluation import Metric
from tasks.contracts.release import RegisteredProgram
from tasks.contracts.run import RunRecord
from tasks.conversion.targets.interface import LoadedModel, ModelInputs, Runtime
from tasks.conversion.variants import open_variant
from tasks.kernel.errors import ConfigurationError, DataContractError, FalajError, RegistryError
from tasks.kernel.files import scratch_folder
from tasks.kernel.process import variables_set
from tasks.kernel.settings import (
    SERVER_FILE,
    Settings,
    find_project,
    no_project,
    server_environment,
)
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import RegisteredVersion
from tasks.registry.model_folder import read_version, verified_encoders
from tasks.registry.programs import fetch_version

if TYPE_CHECKING:
    from tasks.imports.column_encoder import LoadedEncoder

EVENT_TIME = "event_timestamp"
MOST_ROWS = 4096
"""Rows of one call of a model."""


def open(path: str | Path = ".", home: str | Path | None = None) -> Project:
    """Open a project.

    Args:
        path: its folder, which holds `use_case.yaml`, or one inside it.
        home: state folder; without it `.falaj` in the project.

    Raises:
        ConfigurationError: there is no project.
    """
    start = Path(path).expanduser().resolve()
    found = find_project(start)
    if found is None:
        raise ConfigurationError(f"{no_project(start)}. Nothing was opened")
    names = {"FALAJ_FEATURE_REPO": str(found)} | ({"FALAJ_HOME": str(home)} if home else {})
    kept = {n: v for n, v in os.environ.items() if n.startswith("FALAJ_") and n != "FALAJ_HOME"}
    settings = Settings.from_environment({**kept, **names})
    if server := server_environment(settings.home / SERVER_FILE, os.environ):
        os.environ.update(server)
        settings = Settings.from_environment({**kept, **server, **names})
    if settings.location is not None:
        os.environ["FALAJ_HOME"] = str(settings.home)  # its files are those that machines share
    return Project(settings)


@dataclass(frozen=True)
class Project:
    """A project and its state folder."""

    settings: Settings

    @property
    def path(self) -> Path:
        """Folder that holds `use_case.yaml`."""
        return self.settings.feature_repo

    @property
    def config(self) -> PipelineConfig:
        """What `use_case.yaml` says now."""
        with variables_set(self._variables):
            return read_pipeline_config(self.path)

    def command(self, *words: str) -> str:
        """Run a command of `falaj` on this project, its lines shown as they come.

        Returns:
            All that it printed.

        Raises:
            FalajError: it ended with another code than 0.
        """
        line = [sys.executable, "-m", "falaj", *words]
        environment = {**os.environ, **self._variables}
        said = []
        with subprocess.Popen(
            line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            for text in process.stdout:
                sys.stdout.write(text)
                said.append(text)
        if process.returncode:
            last = said[-1].strip() if said else "it printed nothing"
            raise FalajError(f"`falaj {' '.join(words)}` ended with {process.returncode}: {last}")
        return "".join(said)

    def check(self) -> None:
        """Find mistakes in seconds, without training, and print what was found.

        Raises:
            FalajError: there are some; the lines above say which.
        """
        self.command("check")

    def run(self) -> Run:
        """Run the whole loop; finished stages are reused.

        Raises:
            FalajError: a stage failed.
        """
        self.command("run")
        return self.latest_run()

    def latest_run(self) -> Run:
        """The newest finished run.

        Raises:
            ConfigurationError: there is none.
        """
        with variables_set(self._variables):
            folder = self.settings.latest_report()
        try:
            facts = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        except FileNotFoundError as exc:
            raise ConfigurationError(
                f"{self.path.name} has no finished run in {self.settings.home}; begin one with "
                "run(). Nothing was read"
            ) from exc
        record = {name: value for name, value in facts.items() if name in RunRecord.model_fields}
        return Run(RunRecord.model_validate_json(json.dumps(record)), folder / "report.html")

    def models(self) -> pd.DataFrame:
        """All versions of the project's model, newest first.

        Returns:
            A row a version: version, aliases, created, metric, value, low, high; the last four are
            empty where it was not judged here.
        """
        columns = ["version", "aliases", "created", "metric", "value", "low", "high"]
        registry = open_registry(self.settings)
        if registry is None:
            return pd.DataFrame(columns=columns)
        rows = []
        for version in reversed(registry.versions(self.config.registry.model_name)):
            facts = version_facts(version, registry)
            quality = facts["quality"].model_dump() if facts["quality"] else {}
            rows.append({**facts, **quality, "aliases": ", ".join(facts["aliases"])})
        return pd.DataFrame(rows, columns=columns)

    def champion(self) -> Model:
        """The version in service.

        Raises:
            RegistryError: nothing was promoted yet.
        """
        name = self.config.registry.model_name
        version = existing_registry(self.settings).by_alias(name, "champion")
        if version is None:
            raise RegistryError(f"{name} has no champion yet; run() trains and promotes one")
        return Model(self, version)

    def model(self, number: int) -> Model:
        """One version of the project's model.

        Raises:
            RegistryError: there is no such version.
        """
        name = self.config.registry.model_name
        return Model(self, existing_registry(self.settings).version(name, number))

    def features(self, keys: pd.DataFrame, at: datetime | str | None = None) -> pd.DataFrame:
        """The features of entities.

        Args:
            keys: a row an entity, with the key columns.
            at: moment at which they were known, with a time zone (`"2026-01-31T12:00Z"`), or the
                column of `keys` that holds it; they are then read from history, as in training.
                None: now, online.

        Returns:
            `keys` with a column `<view>__<feature>` for each feature, rows in the same order.

        Raises:
            ConfigurationError: nothing was refreshed yet.
            DataContractError: a key column is absent, or a moment has no time zone.
        """
        from tasks.features.access.store import find_service, open_store, quiet

        service_name = self.config.features.training_set.feature_service
        with variables_set(self._variables), quiet():
            store = open_store(self.settings.features_home, self.path)
            service = find_service(store, service_name)
            if at is not None:
                return _historical(store, service, keys, at)
            from tasks.features.online.reader import OnlineReader

            with closing(OnlineReader(store, service, self.config.features.online)) as reader:
                answer = reader.read({name: keys[name].tolist() for name in keys.columns})
        return keys.assign(**answer.columns)

    def training_set(self) -> pd.DataFrame:
        """Rows that the newest run trained, validated and tested on, with their labels."""
        data = self.latest_run().record.dataset.snapshot.data
        return pd.read_parquet(self.settings.store.path(data))

    @property
    def _variables(self) -> dict[str, str]:
        """By which what is imported finds the project."""
        return {"FALAJ_HOME": str(self.settings.home), "FALAJ_FEATURE_REPO": str(self.path)}

    def _repr_html_(self) -> str:
        config = self.config
        rows = {"project": config.name, "question": config.question, "folder": self.path}
        try:
            rows |= self.latest_run().facts()
        except ConfigurationError:
            rows |= {"runs": "none yet: run()"}
        return table(rows)


def _historical(store: Any, service: Any, keys: pd.DataFrame, at: datetime | str) -> pd.DataFrame:

    from tasks.features.offline.duck import sql_text

    named = isinstance(at, str) and at in keys.columns
    try:
        frame = keys.rename(columns={at: EVENT_TIME}) if named else keys.copy()
        frame[EVENT_TIME] = frame[EVENT_TIME] if named else pd.Timestamp(at)
    except ValueError as exc:
        raise DataContractError(
            f"at={at!r} is neither a moment nor one of the columns {', '.join(keys.columns)}. "
            "Nothing was read"
        ) from exc
    if getattr(frame[EVENT_TIME].dtype, "tz", None) is None:
        raise DataContractError(
            f"the moments are {frame[EVENT_TIME].dtype}, expected times with a zone, such as "
            "datetime(2026, 1, 31, tzinfo=UTC). Nothing was read"
        )
    frame["falaj_row"] = range(len(frame))
    with scratch_folder("falaj-features") as folder:
        file = folder / "entities.parquet"
        frame.to_parquet(file, index=False)
        job = store.get_historical_features(
            entity_df=f"SELECT * FROM read_parquet({sql_text(file)})",
            features=service,
            full_feature_names=True,
            filter_by_created_timestamp=True,
        )
        found: pd.DataFrame = job.to_df().sort_values("falaj_row")
    found = found.drop(columns="falaj_row").set_axis(keys.index)
    return found.rename(columns={EVENT_TIME: str(at)}) if named else found


@dataclass(frozen=True)
class Model:
    """One registered version, ready to be asked; it is loaded at the first question."""

    project: Project
    registered: RegisteredVersion

    @property
    def version(self) -> int:
        """Its number."""
        return self.registered.ref.version

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns that it takes: categories, numbers, then texts and images."""
        return self._program.raw_columns.given

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes that it tells apart, where they are several."""
        return self._program.raw_columns.classes

    def predict(self, rows: pd.DataFrame) -> pd.Series[float] | pd.DataFrame:
        """Probability of a label of 1, or the predicted number, of each row.

        Of several classes a column for each with its probability, and `predicted`, the name of the
        most probable one.

        Args:
            rows: with the columns `inputs`; missing values may be null. An image is the path of
                its file, relative to the project, or its bytes.

        Raises:
            DataContractError: a column is absent; `Project.features` adds those of entities. Or a
                value is no text, or no image.
        """
        for column, encoder in self._encoders.items():
            if column not in rows.columns:
                raise DataContractError(
                    f"the data lacks column {column}, whose values the model takes as they are; it "
                    f"has {', '.join(map(str, rows.columns))}"
                )
            given = rows[column].astype(object)
            made = encoder.columns(given.where(given.notna(), None).tolist())
            numbers = pd.DataFrame(made, index=rows.index)
            rows = pd.concat([rows.drop(columns=numbers.columns, errors="ignore"), numbers], axis=1)
        categorical, numeric = self._program.raw_columns.model_inputs(rows)
        inputs = ModelInputs({"categorical": categorical, "numeric": numeric})
        scores = [self._loaded(block) for block in inputs.blocks(MOST_ROWS)]
        if classes := self.classes:
            each = np.concatenate(scores) if scores else np.empty((0, len(classes)), np.float32)
            names = np.array(classes, dtype=object)
            found = pd.DataFrame(each, index=rows.index, columns=names)
            return found.assign(predicted=names[each.argmax(axis=1)])
        values = np.concatenate(scores) if scores else np.empty(0, np.float32)
        return pd.Series(values, index=rows.index, name="score")

    @cached_property
    def _program(self) -> RegisteredProgram:

        settings = self.project.settings
        return fetch_version(self.registered.ref, RegistryLocation.of(settings), settings.store)

    @cached_property
    def _encoders(self) -> dict[str, LoadedEncoder]:
        """What the version encodes texts and images by; it is kept with it."""
        if not self._program.raw_columns.encoders:
            return {}
        from tasks.imports.column_encoder import LoadedEncoder

        found = verified_encoders(self.registered)
        return {c: LoadedEncoder(folder, c, self.project.path) for c, folder in found.items()}

    @cached_property
    def _loaded(self) -> LoadedModel:
        """The variant that answers fastest on this hardware, as a server would take it."""
        record = read_version(self.registered)
        entries = record.variants.variants if record.variants else ()
        for entry in entries:
            if any(goal.chosen and goal.goal == "one-row" for goal in entry.variant.standings):
                folder = self.registered.folder / str(entry.folder)
                return open_variant(folder, entry.variant, self._program, Runtime())
        raise RegistryError(
            f"version {self.version} has no accepted variant to ask; convert it with `falaj "
            f"convert {self.version}`"
        )

    def _repr_html_(self) -> str:
        ref = self.registered.ref
        return table({"model": ref.name, "version": ref.version, "program": ref.program_sha256})


@dataclass(frozen=True)
class Run:
    """A finished run and its report."""

    record: RunRecord
    report: Path

    @property
    def metric(self) -> Metric:
        """What models are compared by, on the test rows, with its 95 % interval."""
        return self.record.evaluation.overall.primary

    @property
    def promoted(self) -> bool:
        """Whether the run's version became the champion."""
        return self.record.promotion.promoted

    def facts(self) -> Mapping[str, object]:
        """What matters of it."""
        record, judged = self.record, self.record.evaluation
        overall = judged.overall
        accepted = ", ".join(v.name for v in record.variants if v.accepted) or "none"
        return {
            "model": f"{record.version.name} version {record.version.version}",
            "promoted": "yes" if self.promoted else "no",
            overall.primary_name: f"{overall.primary:.4f} on {overall.num_rows:,} test rows",
            judged.baseline_model_name: f"{judged.baseline_model.primary:.4f}",
            "variants": accepted,
            "drift": f"{record.drift.result} in {record.drift.current}",
            "report": self.report,
        }

    def _repr_html_(self) -> str:
        return table(self.facts())


def table(rows: Mapping[str, object]) -> str:
    """A table of two columns, as a notebook shows it."""
    lines = (
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{''.join(lines)}</table>"
