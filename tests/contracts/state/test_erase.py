"""One entity is erased from all of a state and its backups; the search here is the tests' own."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pandas as pd
import pyarrow.parquet as pq
import pytest

from falaj.context import EXIT_DATA, Context
from falaj.governance.erase import erase, export_subject
from falaj.state import backup, restore
from infra.orchestration.embedded import only_run
from tasks.contracts.base import Artifact, Contract
from tasks.contracts.data import FeatureSnapshot
from tasks.features.online.materialization import materialize
from tasks.features.tables.build import publish_tables
from tasks.governance import erasure
from tasks.kernel.errors import ArtifactError, ConfigurationError, SignatureError
from tasks.kernel.keys.choice import key_store
from tasks.kernel.keys.signed import read_signed
from tasks.kernel.location import Location
from tasks.kernel.settings import REWRITTEN, ArtifactStore, Settings, StagedFolder
from tasks.predictions.labels import import_labels
from tasks.state.prune import plan_pruning
from tests.support.data.builders import frame
from tests.support.data.repository import vouchers
from tests.support.data.shop import Shop, customers, orders
from tests.support.serving.served_rows import MODEL, batch_of, open_log, rows_of
from tests.support.state import acts, become

pytestmark = pytest.mark.usefixtures("own_environment")
WHO, WHERE = "MARKER-17", "TOWN-OF-17"
THEIRS = [f"customer={WHO}"]


class Scores(Contract):
    """Rows that a training set's row is known in by its id alone."""

    scores: Artifact


class World:
    """A shop with what a loop leaves in its state, one customer marked by two values."""

    def __init__(self, folder: Path) -> None:
        self.shop, self.home, self.backups = Shop(folder), folder / "home", folder / "backups"
        os.environ["FALAJ_HOME"] = str(self.home)
        bought, people = orders(), customers()
        for rows in (bought, people):
            rows["customer"] = rows["customer"].replace("c17", WHO)
        people.loc[people["customer"] == WHO, "town"] = WHERE
        self.shop.write("orders", bought)
        self.shop.write("customers", people)
        self.tables, self.snapshot = self.shop.tables(), self.shop.training_set()
        publish_tables(
            self.tables, vouchers(self.tables.tables), self.settings.features_home, self.store
        )
        materialize(self.tables, self.shop.config.window, self.settings)
        rows = pd.read_parquet(self.store.path(self.snapshot.data))
        self.ids = {*rows.loc[rows["customer"] == WHO, "order_id"]}
        self.scores = self.score(rows[["order_id"]].assign(score=0.5))
        (self.home / "monitoring").mkdir(exist_ok=True)
        (self.home / "monitoring" / "alerts.jsonl").write_text(f'{{"example": "{WHO}"}}\n')
        with open_log(self.home) as log:
            batch = batch_of(frame(100).head(4), ["a", "b", "c", "d"])
            for number, one in enumerate(batch.calls):
                one.entities, one.subject = {"customer": [[WHO, "c01"][number % 2]]}, "shop"
            log.served(batch)
        labels = pd.DataFrame({"request_id": ["a", "b"], "label": [1, 0]})
        labels.to_parquet(folder / "labels.parquet")
        import_labels(self.home, MODEL, folder / "labels.parquet", datetime.now(UTC))

    @property
    def settings(self) -> Settings:
        return self.shop.settings

    @property
    def store(self) -> ArtifactStore:
        return self.settings.store

    @property
    def context(self) -> Context:
        return Context(self.settings, assume_yes=True)

    def score(self, rows: pd.DataFrame) -> Scores:
        def build(folder: StagedFolder) -> Scores:
            rows.to_parquet(folder.path / "scores.parquet")
            return Scores(scores=folder.artifact("scores.parquet"))

        return self.store.build_once("scores", "0" * 24, Scores, build)

    def others(self) -> list[int]:
        """Rows of everybody else, in what is read after an erasure."""
        files = [self.store.path(self.snapshot.data), self.store.path(self.scores.scores)]
        files += [
            self.store.path(each.artifact) for each in (*self.tables.raw, *self.tables.tables)
        ]
        return [len(pd.read_parquet(file)) for file in files]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FALAJ_HOME", raising=False)
        return World(tmp_path_factory.mktemp("grown"))


@pytest.fixture
def world(grown: World, tmp_path: Path) -> World:
    """A copy of its own, with a backup."""
    folder = grown.home.parent
    shutil.copytree(folder, tmp_path / "w", symlinks=True)
    moved = World.__new__(World)
    moved.__dict__ |= {**grown.__dict__, "shop": Shop.__new__(Shop)}
    moved.shop.repo, moved.home = tmp_path / "w" / "shop", tmp_path / "w" / "home"
    moved.shop.settings = Settings(home=moved.home, feature_repo=moved.shop.repo)
    moved.shop.store, moved.backups = moved.settings.store, tmp_path / "w" / "backups"
    os.environ["FALAJ_HOME"] = str(moved.home)
    backup(str(moved.backups), context=moved.context)
    return moved


def holding(folder: Path, *texts: str) -> list[str]:
    """Files below a folder that hold a text: as bytes, in a column of a table, or in an archive."""
    return [
        file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and any(_holds(file, text) for text in texts)
    ]


def _holds(file: Path, text: str) -> bool:
    content = file.read_bytes()
    if content[:4] == b"PAR1":
        return text in content.decode("latin-1") or text in str(pq.read_table(file).to_pydict())
    if content[:4] == b"PK\x03\x04":
        with ZipFile(file) as archive:
            return any(text.encode() in archive.read(name) for name in archive.namelist())
    return text.encode() in content


def erased(world: World, **options: Any) -> dict[str, Any]:
    shown = erase(entity=THEIRS, backups=[str(world.backups)], context=world.context, **options)
    assert shown.code == 0, shown.lines
    return dict(shown.facts)


def test_nothing_of_an_entity_is_left_and_all_of_the_others(world: World) -> None:
    found = {Path(name).parts[0] for name in holding(world.home, WHO, WHERE)}
    assert found >= {"artifacts", "predictions", "monitoring", "use_cases"}
    assert holding(world.backups, WHO)
    before, counted = world.others(), erased(world, dry_run=True)["rows"]
    assert holding(world.home, WHO)
    told = erased(world)
    assert holding(world.home, WHO, WHERE) == []
    assert holding(world.backups, WHO, WHERE) == []
    num = len(world.ids)
    assert told["rows"].items() >= {"artifacts/snapshots": num, "online: habits": 1}.items()
    assert counted["artifacts/snapshots"] == 2 * num  # in the state, and in the backup
    taken, scored, bought, people, habits = (
        was - left for was, left in zip(before, world.others(), strict=True)
    )
    assert (taken, scored, people, bought) == (num, num, 1, habits)
    logged = rows_of(world.home, ["request_id"])["request_id"].tolist()
    assert logged == ["b", "d"]
    assert told["to_be_erased_by_their_owner"] == ["raw/orders.csv", "raw/customers.csv"]
    assert f"{world.snapshot.data.uri}" in told["cannot_be_rebuilt"]
    [file] = (world.home / "erasures").glob("*T*.json")
    trusted = key_store(world.home).public_keys("evidence")
    assert read_signed(trusted, file.read_text(), "it") == json.loads(json.dumps(told))
    (act,) = acts(world.home, "erase")
    assert (act["left"], act["subject"]) == (0, {"entity": told["entity"]})


def test_what_comes_from_the_source_again_is_left_out(world: World) -> None:
    erased(world)
    assert holding(world.shop.repo, WHO)
    landed = world.shop.land()
    rows = pd.read_parquet(world.store.path(landed.tables[0].artifact))
    assert len(rows) == world.others()[2]
    assert WHO not in set(rows["customer"])
    assert world.shop.tables().version != world.tables.version
    assert holding(world.home, WHO, WHERE) == []


def test_what_was_changed_otherwise_is_still_refused(world: World) -> None:
    erased(world)
    file = world.store.path(world.snapshot.data)
    found = world.store.find("snapshots", file.parent.name, FeatureSnapshot)
    assert found == world.snapshot
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match="was changed or damaged"):
        world.store.path(world.snapshot.data)
    note = file.with_name(REWRITTEN)
    note.write_text(note.read_text().replace(world.snapshot.data.sha256, "0" * 64))
    with pytest.raises(SignatureError):
        world.store.path(world.snapshot.data)


@pytest.mark.parametrize("after", [1, 9, 15])
def test_an_erasure_that_was_killed_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    left, select = [after], erasure.select

    def killed(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        select(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(erasure, "select", killed)
        with pytest.raises(KeyboardInterrupt):
            erased(world)
    erased(world)
    assert holding(world.home, WHO, WHERE) == holding(world.backups, WHO, WHERE) == []
    scores = pd.read_parquet(world.store.path(world.scores.scores))
    assert not world.ids & {*scores["order_id"]}


@pytest.mark.parametrize("kept", ["in the folder", "in a later backup"])
def test_a_restored_backup_does_not_bring_an_entity_back(world: World, kept: str) -> None:
    shown = erase(entity=THEIRS, context=world.context)
    assert shown.code == 0
    oldest = sorted((world.backups / "backups").glob("*.json"))[0].stem
    if kept == "in a later backup":
        backup(str(world.backups), context=world.context)
    for path in world.home.iterdir():
        if path.name != "erasures" or kept != "in the folder":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert holding(world.backups, WHO)
    restore(str(world.backups), name=oldest, context=world.context)
    tables = [name for name in holding(world.home, WHO, WHERE) if name.endswith(".parquet")]
    assert tables == []
    assert not [*world.home.rglob("online.db")]
    assert world.others()[0] == world.snapshot.num_rows - len(world.ids)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_content_in_a_location_is_erased_too(
    world: World, monkeypatch: pytest.MonkeyPatch, is_encrypted: bool
) -> None:
    place = world.home.parent / "shared"
    if is_encrypted:
        monkeypatch.setenv("FALAJ_ENCRYPTION", "state")
        monkeypatch.setenv("FALAJ_KEYS", (world.home.parent / "keys").as_uri())
    become(monkeypatch, world.home, place.as_uri())
    settings = Settings(world.home, world.shop.repo, location=Location(place.as_uri()))
    store = settings.store
    for kind, key in (("snapshots", world.snapshot.data.uri.split("/")[1]), ("scores", "0" * 24)):
        assert store.find(kind, key, FeatureSnapshot if kind == "snapshots" else Scores)
    assert bool(holding(place, WHO)) is not is_encrypted
    shown = erase(entity=THEIRS, context=Context(settings, assume_yes=True))
    assert shown.code == 0
    assert holding(place, WHO, WHERE) == holding(world.home, WHO, WHERE) == []
    shutil.rmtree(world.home / "artifacts")
    rows = pd.read_parquet(store.path(world.snapshot.data))
    assert len(rows) == world.snapshot.num_rows - len(world.ids)


@pytest.mark.parametrize("masked", [(), ("subject",)])
def test_who_asked_is_erased_with_the_labels_and_nobody_else(
    world: World, masked: tuple[str, ...], tmp_path: Path
) -> None:
    shutil.rmtree(world.home / "predictions")
    mixed = batch_of(frame(100).head(4), ["a", "b", "c", "d"])
    for number, one in enumerate(mixed.calls):
        one.subject = "erin@example" if number % 2 else "frank"
    with open_log(world.home, masked=masked) as log:
        log.served(mixed)
        log.served(batch_of(frame(100).head(2), ["e", "f"], subject="erin@example"))
    labels = pd.DataFrame({"request_id": ["a", "b", "e"], "label": [1, 0, 1]})
    labels.to_parquet(tmp_path / "labels.parquet")
    import_labels(world.home, MODEL, tmp_path / "labels.parquet", datetime.now(UTC))
    told = erase(entity=["subject=erin@example"], context=world.context).facts
    assert told["rows"] == {"predictions/labels": 2, f"predictions/model={MODEL}": 4}
    assert rows_of(world.home, ["request_id"])["request_id"].tolist() == ["a", "c"]
    assert holding(world.home, "erin@example") == []


def test_a_copy_of_the_data_is_given_out(world: World, tmp_path: Path) -> None:
    shown = export_subject(tmp_path / "out", entity=THEIRS, context=world.context)
    lines = (tmp_path / "out" / "raw.orders.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["customer"] for row in rows} == {WHO}
    assert {"raw.customers.jsonl", "features.habits.jsonl"} < {*shown.facts["files"]}
    assert sum(num for name, num in shown.facts["files"].items() if "day=" in name) == 2
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["sources"]["orders"] == "raw/orders.csv"
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigurationError, match="expected a new folder"):
        export_subject(tmp_path / "out", entity=THEIRS, context=world.context)


def test_a_damaged_table_is_named_and_the_exit_code_tells(world: World) -> None:
    [segment] = (world.home / "predictions" / f"model={MODEL}").rglob("*.parquet")
    segment.write_bytes(segment.read_bytes()[:100])
    shown = erase(entity=THEIRS, context=world.context)
    assert shown.code == EXIT_DATA
    assert [*shown.facts["not_readable"]] == [f"state: {segment.relative_to(world.home)}"]


@pytest.mark.parametrize(
    "wrong", ["customer", "=17", "customer=", "customer=17 customer=18", "cutsomer=17"]
)
def test_what_names_no_entity_is_refused(world: World, wrong: str) -> None:
    with pytest.raises(ConfigurationError, match=r"NAME=VALUE|twice|such as customer"):
        erase(entity=wrong.split(), context=world.context)
    with only_run(world.home), pytest.raises(ConfigurationError, match="is running a flow"):
        erase(entity=THEIRS, context=world.context)
    assert not (world.home / "erasures").exists()


def test_rows_of_a_class_are_kept_no_longer_than_its_days(tmp_path: Path) -> None:
    settings = Settings(tmp_path, tmp_path)
    then = (datetime.now(UTC) - timedelta(days=400)).timestamp()
    for kind, data_class in (("landed", "personal"), ("snapshots", "internal")):
        folder = settings.store.root / kind / "k"
        folder.mkdir(parents=True)
        (folder / "value.json").write_text(json.dumps({"handling": {"data_class": data_class}}))
        (folder / "rows").write_bytes(b"x" * 200_000)
        os.utime(folder / "value.json", (then, then))
    named = tmp_path / "reports" / "1"
    named.mkdir(parents=True)
    (named / "report.json").write_text('"artifact:landed/k/rows" "artifact:snapshots/k/rows"')
    month = timedelta(days=30)
    assert plan_pruning(settings, 5, month, None).builds == {}
    assert [*plan_pruning(settings, 5, month, None, {"personal": 365}).builds] == ["landed/k"]
    assert plan_pruning(settings, 5, month, None, {"personal": 500}).builds == {}
