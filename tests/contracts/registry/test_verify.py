"""Bills of materials of registered versions, and `falaj verify` from a model to its raw files."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from falaj.__main__ import main
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.data import SourceFile
from tasks.contracts.run import RunRecord
from tasks.contracts.training import StartingPoint
from tasks.governance.bill import environment_bill
from tasks.kernel.files import digest_of
from tasks.kernel.settings import Settings
from tasks.lineage.journal import Journal
from tasks.lineage.steps import conversion_steps, refresh_steps, version_steps
from tasks.lineage.trace import address, trace
from tasks.predictions.schema import FIXED, day_folder
from tasks.registry.mlflow_registry import CHAMPION, VARIANTS_TAG, RegisteredVersion
from tasks.registry.model_folder import attach_variants, read_version
from tasks.release.config import ReleaseConfig
from tasks.release.ledger import ReleaseLedger
from tests.support.data.builders import changed
from tests.support.registry.builders import CONFIG, World
from tests.support.reporting.examples import (
    COMMIT,
    ENTITIES,
    PARENT,
    QUERIES,
    STARTED,
    linked_record,
)
from tests.support.state import told

NAME = CONFIG.model_name


@dataclass
class Known:
    """A champion whose lineage leads to raw files that are there."""

    world: World
    record: RunRecord
    ref: ModelVersionRef

    @property
    def version(self) -> RegisteredVersion:
        return self.world.version(1)

    @property
    def bill(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.version.folder / "bill.cdx.json").read_text())
        return found

    def raw(self, name: str) -> Path:
        return self.world.home.parent / f"{name}.csv"

    def attach(self) -> None:
        journal = Journal(self.world.home / "lineage")
        chain = trace(f"models/{NAME}/1", journal)
        raw = {data.version: address(data) for data in chain.sources()}
        attach_variants(self.ref, self.record.variants, self.world.location, self.world.store, raw)


@pytest.fixture
def known(world: World, tmp_path: Path) -> Known:
    record = linked_record(world.store)
    tables = []
    for table in record.refresh.rows.landed.tables:
        file = tmp_path / f"{table.name}.csv"
        file.write_text(f"{table.name}\n1\n")
        seen = SourceFile(uri=f"file://{file}", sha256=digest_of(file), num_bytes=8)
        tables.append(table.model_copy(update={"source": seen}))
    record = changed(record, {"refresh.rows.landed.tables": tuple(tables)})
    ref = world.register_judged(record.model, record.evaluation, record.dataset, COMMIT)
    found = Known(world, record, ref)
    steps = [
        *refresh_steps(record.refresh, QUERIES),
        *version_steps(ref, record.model, record.dataset, record.evaluation, ENTITIES),
        *conversion_steps(ref, record.dataset, record.variants),
    ]
    Journal(world.home / "lineage").record_steps(steps, PARENT, STARTED, COMMIT)
    found.attach()
    world.registry.set_alias(found.version, CHAMPION)
    return found


def names(things: list[dict[str, str]]) -> list[str]:
    return [thing["name"] for thing in things]


# Bills


def parts(bill: dict[str, Any], kind: str) -> dict[str, str]:
    return {
        part["name"]: part.get("hashes", [{"content": ""}])[0]["content"]
        for part in bill["components"]
        if part["type"] == kind
    }


def test_the_bill_of_the_environment_names_each_installed_package(known: Known) -> None:
    text = (known.version.folder / "environment.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    found = [*distributions()][::-1]  # of two of one name the first is imported
    installed = {str(canonicalize_name(each.name)): each.version for each in found}
    listed = {part["name"]: part["version"] for part in bill["components"]}
    own = bill["metadata"]["component"]
    assert listed | {own["name"]: own["version"]} == installed
    pydantic = next(part for part in bill["components"] if part["name"] == "pydantic")
    assert pydantic["licenses"] == [{"license": {"id": "MIT"}}]
    assert pydantic["purl"] == f"pkg:pypi/pydantic@{installed['pydantic']}"
    assert {len(part["hashes"][0]["content"]) for part in (*bill["components"], own)} == {64}
    environment_bill.cache_clear()
    assert environment_bill() == text


def test_the_bill_of_a_model_names_data_code_weights_and_variants_with_digests(
    known: Known,
) -> None:
    file, record = known.version.folder / "bill.cdx.json", known.record
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(file.read_text()) is None
    listed = read_version(known.version).variants
    assert listed is not None
    assert listed.bill_sha256 == digest_of(file)
    data, weights = parts(known.bill, "data"), parts(known.bill, "file")
    assert data["snapshots/flight_delay_v1"] == record.dataset.snapshot.data.sha256
    assert data[str(known.raw("flights"))] == digest_of(known.raw("flights"))
    assert {"raw/flights", "features/route_stats"} <= data.keys()
    assert weights["program.pt2"] == known.ref.program_sha256
    environment = known.version.folder / "environment.cdx.json"
    assert weights["environment.cdx.json"] == digest_of(environment)
    kept = {v.files.sha256 for v in record.variants if v.files and v.accepted}
    assert {*parts(known.bill, "machine-learning-model").values()} == kept
    own = known.bill["metadata"]["component"]
    assert (own["name"], own["version"]) == (NAME, "1")
    assert own["modelCard"]["modelParameters"]["task"] == "classification"
    metrics = own["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    assert "auc" in {metric["type"] for metric in metrics}
    made = datetime.fromisoformat(known.bill["metadata"]["timestamp"])
    assert made == known.version.created
    code = next(part for part in known.bill["components"] if part["type"] == "application")
    assert (code["name"], code["version"]) == ("falaj", COMMIT)


def test_the_same_version_has_the_same_bill_and_other_variants_another(known: Known) -> None:
    before, tag = known.bill, known.version.tags[VARIANTS_TAG]
    known.attach()
    assert (known.bill, known.version.tags[VARIANTS_TAG]) == (before, tag)
    kept = tuple(v for v in known.record.variants if v.name == "onnx-fp32")
    attach_variants(known.ref, kept, known.world.location, known.world.store)
    assert len(parts(known.bill, "machine-learning-model")) == 1
    assert known.bill["serialNumber"] != before["serialNumber"]
    assert read_version(known.version).damage == ()


def test_a_model_that_began_with_another_one_names_it_as_its_ancestor(known: Known) -> None:
    world = known.world
    start = StartingPoint(
        version=known.ref,
        checkpoint=known.record.model.checkpoint,
        columns=known.record.model.columns,
        trained_on=known.record.model.splits.train,
    )
    begun = known.record.model.model_copy(update={"started_from": start})
    world.registry.set_tags(known.version, {"program_sha256": "0" * 64})  # another program's
    ref = world.register_judged(begun, known.record.evaluation, known.record.dataset)
    attach_variants(ref, known.record.variants, world.location, world.store)
    bill = json.loads((world.version(2).folder / "bill.cdx.json").read_text())
    (ancestor,) = bill["metadata"]["component"]["pedigree"]["ancestors"]
    assert (ancestor["name"], ancestor["version"]) == (NAME, "1")
    assert ancestor["hashes"][0]["content"] == known.ref.program_sha256


# Verifying


def test_a_champion_is_verified_to_its_raw_files(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = told(capsys, "verify")
    assert facts["wrong"] == []
    states = {thing["name"]: thing["state"] for thing in facts["things"]}
    assert {source["name"] for source in facts["sources"]} == {
        str(known.raw(name)) for name in ("flights", "weather", "planes")
    }
    whole = {name for name, state in states.items() if state == "whole"}
    folder = f"models/{NAME}/1"
    assert {f"{folder}/program.pt2", f"{folder}/bill.cdx.json", "snapshots/flight_delay_v1",
            "landed/flights", "raw/flights", str(known.raw("flights"))} <= whole  # fmt: skip
    assert {name for name in states if name not in whole} == {
        name for name in states if name.startswith("views/")
    }
    assert main(["verify"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "is what was made from 3 raw files" in last


def appended(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


HARM: dict[str, tuple[Callable[[Known], Path], str]] = {
    "program": (lambda k: k.version.folder / "program.pt2", f"models/{NAME}/1/program.pt2"),
    "manifest": (lambda k: k.version.folder / "model.json", f"models/{NAME}/1/model.json"),
    "bill": (lambda k: k.version.folder / "bill.cdx.json", f"models/{NAME}/1/bill.cdx.json"),
    "variant": (
        lambda k: next((k.version.folder / "variants").glob("onnx-fp32-*")),
        f"models/{NAME}/1/variants/onnx-fp32-",
    ),
    "snapshot": (
        lambda k: k.world.store.path(k.record.dataset.snapshot.data, verify=False),
        "snapshots/flight_delay_v1",
    ),
    "raw file": (lambda k: k.raw("weather"), "weather.csv"),
    "signature": (lambda k: k.version.folder / "model.json.sig", f"models/{NAME}/1"),
}


@pytest.mark.parametrize("place", HARM)
def test_a_changed_byte_is_named(
    known: Known, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, name = HARM[place]
    appended(path(known))
    facts = told(capsys, "verify", f"models/{NAME}/1", code=4)
    changed_ones = [thing["name"] for thing in facts["wrong"]]
    assert len(changed_ones) == 1
    assert name in changed_ones[0]


def test_what_is_gone_counts_where_it_is_not_in_the_store(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    known.world.store.path(known.record.refresh.tables.tables[0].artifact).unlink()
    facts = told(capsys, "verify")
    gone = [thing for thing in facts["things"] if thing["state"] == "gone"]
    assert names(gone) == ["features/carrier_stats"]
    known.raw("weather").unlink()
    assert names(told(capsys, "verify", code=4)["wrong"]) == [str(known.raw("weather"))]
    shutil.rmtree(known.version.folder / "variants")
    assert len(told(capsys, "verify", code=4)["wrong"]) > 1


def test_a_file_that_was_read_again_since_is_no_changed_one(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    appended(known.raw("weather"))
    tables = known.record.refresh.rows.landed.tables
    seen = SourceFile(uri=f"file://{known.raw('weather')}", num_bytes=9,
                      sha256=digest_of(known.raw("weather")))  # fmt: skip
    again = tuple(
        t.model_copy(update={"source": seen, "artifact": known.record.model.log})
        for t in tables
        if t.name == "weather"
    )
    others = {"rows.landed.tables": again, "tables.raw": again, "tables.tables": ()}
    refresh = changed(known.record.refresh, others)
    journal = Journal(known.world.home / "lineage")
    journal.record_steps(refresh_steps(refresh, QUERIES), PARENT, STARTED, COMMIT)
    facts = told(capsys, "verify")
    assert facts["wrong"] == []
    raw = [t["state"] for t in facts["things"] if t["name"] == str(known.raw("weather"))]
    assert raw == ["digest only"]


def test_a_lineage_that_was_edited_contradicts_the_bill(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    appended(known.raw("weather"))
    (events,) = (known.world.home / "lineage").glob("events-*.jsonl")
    before = digest_of(known.raw("flights"))
    told_digest = next(t.source.sha256 for t in known.record.refresh.rows.landed.tables
                       if t.name == "weather" and t.source)  # fmt: skip
    events.write_text(events.read_text().replace(told_digest, digest_of(known.raw("weather"))))
    facts = told(capsys, "verify", code=4)
    assert before in {thing["sha256"] for thing in facts["things"]}
    assert [thing["where"] for thing in facts["wrong"]] == ["not in the lineage"]
    assert names(facts["wrong"]) == [str(known.raw("weather"))]


def test_a_lineage_that_names_another_snapshot_contradicts_the_registry(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    (events,) = (known.world.home / "lineage").glob("events-*.jsonl")
    lines = events.read_text().splitlines(keepends=True)
    snapshot, other = known.record.dataset.snapshot.data.sha256, "0" * 64
    edited = (
        line.replace(snapshot, other) if f'"train.{NAME}"' in line else line for line in lines
    )
    events.write_text("".join(edited))
    facts = told(capsys, "verify", code=4)
    wrong = [(thing["name"], thing["sha256"]) for thing in facts["wrong"]]
    assert wrong == [(f"models/{NAME}/1", snapshot), ("snapshots/flight_delay_v1", other)]


def test_without_lineage_the_files_are_verified_and_the_rest_is_said_to_be_unknown(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(known.world.home / "lineage")
    facts = told(capsys, "verify", code=1)
    assert {thing["state"] for thing in facts["things"]} == {"whole"}
    assert main(["verify", f"models/{NAME}/9"]) == 1
    assert main(["verify", "feedbeef"]) == 1
    assert main(["verify", "reports/latest"]) == 2


# What was served


def test_a_request_leads_to_version_track_release_and_raw_files_and_back(
    known: Known, capsys: pytest.CaptureFixture[str]
) -> None:
    home = known.world.home
    ledger = ReleaseLedger(Settings(home, home / "repo").metadata_url)
    opened = ledger.open(NAME, "7", "1", ReleaseConfig(), "Ana", can_split=True)
    ledger.mark_moved(opened)
    since = ledger.release(opened.release_id).periods[-1].since
    answered(home, since + timedelta(seconds=1), "r1", "1")
    answered(home, since - timedelta(days=1), "r2", "1")
    answered(home, since, "r3", "7")

    facts = told(capsys, "verify", "requests/r1")
    assert facts["start"]["name"] == f"variants/{NAME}/1/onnx-fp32"
    served = facts["served"]
    assert (served["version"], served["track"]) == ("1", "candidate")
    assert served["endpoint"] == f"/v2/models/{NAME}/infer"
    assert [text.partition(" (")[0] for text in served["releases"]] == [
        f"release of {NAME} version 1"
    ]
    assert str(known.raw("flights")) in names(facts["things"])
    assert told(capsys, "trace", "requests/r2")["served"]["releases"] == []
    assert main(["verify", "requests/r4"]) == 4

    for start in ("snapshots/flight_delay_v1", digest_of(known.raw("flights"))):
        facts = told(capsys, "trace", start, "--downstream")
        assert f"models/{NAME}/1" in names(facts["made"])
        assert [release["release_id"] for release in facts["releases"]] == [opened.release_id]
        assert [(c["version"], c["answered"]) for c in facts["served"]] == [("1", 2)]
    assert told(capsys, "trace", "views/route_stats", "--downstream")["damaged"] == []


def answered(home: Path, at: datetime, request_id: str, version: str) -> None:
    row = {
        "request_id": request_id, "request_row": 0, "event_timestamp": at, "model": NAME,
        "version": version, "variant": "onnx-fp32", "slot": "candidate", "hardware": "cpu",
        "score": 0.5,
    }  # fmt: skip
    folder = day_folder(home, NAME, at.date())
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row], schema=FIXED), folder / f"part-{request_id}.parquet")
