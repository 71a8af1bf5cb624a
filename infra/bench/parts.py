"""The parts of the bench, what each of them measures, and what a measurement is given.

Each measurement is a function, or a module with `figures(bench)`, and runs in a process of its own:

    python -m infra.bench.parts PART/NAME FOLDER usual|small

writes its figures to `outcome.json` in the folder, or the reason why it failed.

What a finished loop has left: the facts that several benches measure on.

Wait for what other processes do.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import TypeAdapter

from infra.bench.figures import Figure, LeftOut, Measured
from tasks.contracts.data import DatasetSchema
from tasks.contracts.run import RunRecord
from tasks.kernel.process import attempts
from tasks.kernel.settings import Settings

if TYPE_CHECKING:
    from feast import FeatureStore

    from flows.config import PipelineConfig


T = TypeVar("T")
OUTCOME_FILE = "outcome.json"
Outcome = TypeAdapter(list[Figure | LeftOut] | str)


@dataclass(frozen=True)
class Measurement:
    """One module of figures.

    Attributes:
        reads_loop: whether it reads the state folder of a finished loop.
        limit_s: one that hangs must not keep the others from being measured.
    """

    part: str
    name: str
    what: str
    reads_loop: bool = False
    limit_s: int = 3600

    @property
    def title(self) -> str:
        """By which it is chosen on the command line."""
        return f"{self.part}/{self.name}"

    def figures(self, bench: Bench) -> Measured:
        """Measure: the function of its name in the part's module, or `figures` of its own one."""
        module = importlib.import_module(f"infra.bench.{self.part}")
        if not callable(measure := getattr(module, self.name, None)):
            measure = importlib.import_module(f"{module.__name__}.{self.name}").figures
        return cast("Measured", measure(bench))


@dataclass(frozen=True)
class Bench:
    """What a measurement is given.

    Attributes:
        folder: empty, for all that it writes.
        small: whether to measure as little as shows that the measurement works. What comes out is
            then no figure of anything.
    """

    folder: Path
    small: bool = False

    def size(self, usual: T, small: T) -> T:
        """One of the two, as asked."""
        return small if self.small else usual

    @property
    def settings(self) -> Settings:
        """Of the finished loop."""
        return Settings.from_environment()

    @property
    def config(self) -> PipelineConfig:
        """Of the finished loop's use case."""
        from flows.config import read_pipeline_config  # half a second, which few of them need

        return read_pipeline_config(self.settings.feature_repo)


MEASUREMENTS = (
    Measurement("loop", "whole", "the loop with Prefect, again, and without Prefect", True),
    Measurement("features", "retrieval", "the plug-in, bare polars, Feast's DuckDB store", True),
    Measurement("features", "materialization", "the engine and Feast's own, to Redis and SQLite"),
    Measurement("features", "online_read", "the reader, raw HMGET and Feast's SDK on Redis", True),
    Measurement("features", "false_alarms", "every suite on every day of the year", True),
    Measurement("features", "drift_check", "the drift check and Evidently's preset", True),
    Measurement("features", "drift_peers", "delay until drift is noticed, ours and others'", True),
    Measurement("features", "scale", "tables of 1, 10 and 100 times the rows, DuckDB and Spark"),
    Measurement("training", "strategies", "ranks on Horovod, on DDP and alone"),
    Measurement("training", "launch", "from a training's start to its first epoch", True),
    Measurement("training", "reading", "rows from disk, memory of a rank", True),
    Measurement("training", "compression", "bytes of compressed gradients, and their AUC", True),
    Measurement("training", "checkpoints", "what checkpoints cost"),
    Measurement("training", "elastic", "ranks lost, cut off and added"),
    Measurement("training", "step_clock", "what a rank's clock costs"),
    Measurement("training", "smaller_models", "pruned and distilled networks", True),
    Measurement("training", "spread", "AUC over seeds, ranks and rounding", True),
    Measurement("conversion", "tabular", "variants of the loop's model", True),
    Measurement("conversion", "encoder", "variants of a sentence encoder"),
    Measurement("serving", "engine", "overhead, overload, swaps, roll back"),
    Measurement("serving", "http_request", "an answer over HTTP, ours and others'"),
    Measurement("serving", "edge", "Envoy before a server"),
    Measurement("serving", "replicas", "several serving processes"),
    Measurement("serving", "prediction_log", "the log of predictions"),
    Measurement("serving", "entities", "requests that name entities", True),
    Measurement("serving", "release", "simulated releases"),
    Measurement("serving", "roll_back", "a roll back by hand, through all processes"),
    Measurement("operation", "platform", "the platform's start and idle cost"),
    Measurement("operation", "command_line", "the command line before it does anything"),
    Measurement("operation", "first_model", "from pip install to a promoted model"),
    Measurement("operation", "leases", "leases of devices"),
    Measurement("operation", "state", "the loop on S3 and PostgreSQL, and in a folder"),
    Measurement("operation", "backup", "the loop beside backups, and alone"),
    Measurement(
        "operation", "encryption", "the loop encrypted, and alone; a key rotated under load"
    ),
    Measurement("operation", "costs", "the ledger of costs, and a control group"),
    Measurement("operation", "replay", "a year replayed: policies, faults, time", True, 10800),
    Measurement("operation", "replay_traffic", "the same of the traffic's years", False, 10800),
    Measurement("operation", "retraining", "from a drift result to its retraining"),
    Measurement("gpu", "precision", "networks in fp32, bf16 and fp16, and bare products"),
    Measurement("gpu", "strategies", "one rank on NCCL: Horovod, DDP, FSDP, and alone"),
    Measurement("gpu", "training", "whole trainings on a device and on the processor"),
)
ON_DEVICE = {"gpu"}
"""Parts for another machine, measured where they are named."""
PARTS = tuple(dict.fromkeys(each.part for each in MEASUREMENTS))


def chosen(words: Sequence[str]) -> tuple[Measurement, ...]:
    """The measurements of the named parts, or those named as `part/name`.

    Without a word all but those that need a device.

    Raises:
        ValueError: a word names nothing.
    """
    if unknown := sorted(set(words) - {*PARTS, *(each.title for each in MEASUREMENTS)}):
        known = ", ".join(each.title for each in MEASUREMENTS)
        raise ValueError(
            f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}, and of them {known}"
        )
    wanted = set(words) or set(PARTS) - ON_DEVICE
    return tuple(each for each in MEASUREMENTS if {each.part, each.title} & wanted)


def newest_record(settings: Settings) -> RunRecord:
    """The record of the newest finished loop of a state folder.

    Raises:
        RuntimeError: there is none, or it cannot be read.
    """
    report = settings.reports / "latest" / "report.json"
    if not report.exists():
        raise RuntimeError(
            f"{report} does not exist: this is measured on the data of a finished loop. Run "
            "`make run` first, or name the state folder of one"
        )
    try:
        facts = json.loads(report.read_text())
        known = {k: v for k, v in facts.items() if k in RunRecord.model_fields}
        return RunRecord.model_validate(known)
    except ValueError as exc:  # no JSON, or not the record of this version
        raise RuntimeError(
            f"{report} is damaged or was written by another version ({exc}); run `make run` again"
        ) from exc


def feast_store(registry: Path, **stores: Any) -> FeatureStore:
    """A Feast store that only a measurement uses."""
    from feast import FeatureStore, RepoConfig  # seconds, which few of them need

    stores |= {"project": "bench", "provider": "local", "entity_key_serialization_version": 3}
    return FeatureStore(config=RepoConfig(registry=str(registry), **stores))


def plain_schema(categories: int, numbers: int) -> DatasetSchema:
    """Columns of rows that are made up."""
    words = tuple(f"category_{number}" for number in range(categories))
    figures = tuple(f"number_{number}" for number in range(numbers))
    return DatasetSchema(
        row_id="row", event_time="at", label="label", categorical=words, numeric=figures
    )


def wait_until(
    condition: Callable[[], T], what: str, limit_s: float = 30, pause_s: float = 0.05
) -> T:
    """Poll until `condition` holds, every `pause_s` seconds; what it gave then.

    Raises:
        TimeoutError: it did not within the limit.
    """
    for _ in attempts(limit_s, pause_s):
        if found := condition():
            return found
    raise TimeoutError(f"not within {limit_s} s: {what}")


def main(title: str, folder: str, size: str) -> None:
    """Measure."""
    # What a measurement started ends with it, a platform too, which needs its turn.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    (measurement,) = chosen([title])
    scratch, file = Path(folder) / "scratch", Path(folder) / OUTCOME_FILE
    scratch.mkdir()
    try:
        figures = measurement.figures(Bench(scratch, small=size == "small"))
        file.write_bytes(Outcome.dump_json(figures))
    except Exception as exc:
        file.write_bytes(Outcome.dump_json(f"{type(exc).__name__}: {exc}"))
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
