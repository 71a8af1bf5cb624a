"""Locations: a folder and S3 keep the same promises."""

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

import falaj
from infra.platform.health import check_copy
from tasks.contracts.base import Artifact
from tasks.kernel import settings as state
from tasks.kernel.errors import ArtifactError, ConfigurationError, StorageError, TransientError
from tasks.kernel.files import digest_of
from tasks.kernel.location import Location, object_name, part_bytes
from tasks.kernel.settings import ArtifactStore, Settings
from tasks.metadata.identity import check_state, state_identity
from tasks.predictions.config import PredictionLogConfig
from tasks.predictions.schema import model_folder
from tasks.predictions.segments import SegmentWriter
from tasks.predictions.upkeep import keep_up
from tests.support.data.builders import frame
from tests.support.host.wrong_store import WrongStore
from tests.support.services.servers import s3_server
from tests.support.serving.served_rows import MODEL, NOW, batch_of, open_log, rows_of
from tests.support.state import become, build_notes, make_bucket


def build_many(store: ArtifactStore) -> None:
    for number in range(40):
        build_notes(store, str(number) * 1_000_000, f"k{number}")


def test_of_many_that_create_an_object_one_does(location: Location) -> None:
    contents = [str(number).encode() for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda content: location.create("a/b", content), contents)
    assert sorted(made) == [False] * 7 + [True]
    assert not location.create("a/b", b"another")


def test_no_change_of_many_is_lost(location: Location) -> None:
    def add(number: int) -> None:
        for _ in range(5):
            location.change("log", lambda old: (old or b"") + f"{number}\n".encode())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    lines = (location.read("log") or b"").decode().split()
    assert sorted(lines) == sorted("0123" * 5)


def test_content_is_kept_once_and_checked_when_it_is_read(
    location: Location, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"x" * 300_000)
    digest, num_bytes = location.send_content(source)
    assert (digest, num_bytes) == (digest_of(source), 300_000)
    first = location.entries("objects")
    location.send_content(source)
    assert location.entries("objects") == first
    location.bring(object_name(digest), target, sha256=digest)
    assert target.read_bytes() == source.read_bytes()
    location.write(object_name(digest), b"y" * 300_000)
    with pytest.raises(ArtifactError, match=f"{digest[:12]}: it was changed or damaged"):
        location.bring(object_name(digest), target, sha256=digest)
    assert target.read_bytes() == source.read_bytes()


def test_what_one_machine_built_another_uses_and_brings_only_what_it_reads(
    url: str, tmp_path: Path
) -> None:
    here, there = (ArtifactStore(tmp_path / name, Location.of(url)) for name in ("a", "b"))
    made = build_notes(here)
    assert build_notes(there, "would be another") == made
    assert not (there.root / "notes" / "k" / "note.txt").exists()
    assert there.path(made.text).read_text() == "hello"
    assert not (there.root / "notes" / "k" / "pages").exists()
    assert (there.path(made.pages) / "b" / "2").read_text() == "two"
    assert [folder.name for folder in there.folders("notes")] == ["k"]


@pytest.mark.parametrize("on_one_machine", [False, True])
def test_of_two_that_build_at_once_both_use_what_the_first_wrote(
    url: str, on_one_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = ArtifactStore(tmp_path / "a", None if on_one_machine else Location.of(url))
    early = late if on_one_machine else ArtifactStore(tmp_path / "b", late.location)
    first = []

    def a_moment_later(_: object) -> Iterator[Artifact]:  # than the late one looked
        monkeypatch.undo()
        first.append(build_notes(early, "early"))
        return iter(())

    monkeypatch.setattr("tasks.kernel.settings.named_artifacts", a_moment_later)
    assert [build_notes(late, "late")] == first
    assert [store.path(first[0].text).read_text() for store in (late, early)] == ["early"] * 2
    assert late.num_builds + early.num_builds == 1 + on_one_machine


def test_a_copy_that_was_damaged_is_brought_again(url: str, tmp_path: Path) -> None:
    here, there = (ArtifactStore(tmp_path / name, Location.of(url)) for name in ("a", "b"))
    made = build_notes(here)
    there.path(made.text).write_text("tampered")
    assert there.path(made.text).read_text() == "hello"
    (there.path(made.pages) / "1").unlink()
    assert (there.path(made.pages) / "1").read_text() == "one hello"
    for name in (".shared.json", "note.txt"):  # as an older release left it that was killed
        (there.root / "notes" / "k" / name).unlink()
    assert there.path(build_notes(there).text).read_text() == "hello"


def test_a_build_whose_content_is_gone_or_damaged_is_built_again(url: str, tmp_path: Path) -> None:
    here, there = (ArtifactStore(tmp_path / name, Location.of(url)) for name in ("a", "b"))
    made = build_notes(here)
    assert here.location is not None
    here.location.remove([object_name(made.text.sha256)])
    with pytest.raises(ArtifactError, match="run the stage that makes it again"):
        there.path(made.text)
    assert there.path(build_notes(there).text).read_text() == "hello"
    here.location.write("artifacts/notes/k.json", b"{ half of it")
    assert there.path(build_notes(there).text).read_text() == "hello"


def test_what_was_built_before_there_was_a_location_goes_there_when_it_is_used(
    url: str, tmp_path: Path
) -> None:
    made = build_notes(ArtifactStore(tmp_path / "a"))
    assert build_notes(ArtifactStore(tmp_path / "a", Location.of(url))) == made
    other = ArtifactStore(tmp_path / "b", Location.of(url))
    assert other.path(build_notes(other, "not built").text).read_text() == "hello"


def test_copies_that_were_not_used_for_long_make_room(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (ArtifactStore(tmp_path / name, Location.of(url)) for name in ("a", "b"))
    made = [build_notes(here, "x" * 100_000, key) for key in ("k1", "k2", "k3")]
    monkeypatch.setattr("tasks.kernel.settings.CACHE_KEPT_S", -1)
    monkeypatch.setenv("FALAJ_CACHE_GB", "0.0002")
    for notes in made:
        there.path(notes.text)
    assert sorted(path.name for path in (there.root / "notes").iterdir()) == ["k2", "k3"]
    monkeypatch.setenv("FALAJ_CACHE_GB", "ten")
    with pytest.raises(ConfigurationError, match="FALAJ_CACHE_GB is 'ten'; expected a number"):
        there.path(made[0].text)
    monkeypatch.setenv("FALAJ_CACHE_GB", "1")
    assert there.path(made[0].text).read_text() == "x" * 100_000


def test_files_of_the_state_are_the_same_on_all_machines(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    become(monkeypatch, a, url)
    state.put(a / "audit" / "head.json", "1")
    state.append(a / "audit" / "lines", ["one", "two"])
    (a / "run" / "deep").mkdir(parents=True)
    (a / "run" / "model").write_bytes(b"m" * 2_000_000)
    (a / "run" / "deep" / "x.json").write_text("{}")
    (a / "run" / "uv.lock").write_text("of a model")
    for hidden in (".hidden", "deep/lock"):
        (a / "run" / hidden).touch()
    state.send(a / "run")
    assert state.claim(a / "secrets" / "key", "of a", private=True) == b"of a"

    become(monkeypatch, b, url)
    assert state.bring(b / "audit" / "head.json").read_text() == "1"
    state.append(b / "audit" / "lines", ["three"])
    assert [path.name for path in state.children(b)] == ["audit", "run", "secrets"]
    assert (state.bring(b / "run") / "model").stat().st_size == 2_000_000
    assert sorted(p.name for p in (b / "run").rglob("*")) == ["deep", "model", "uv.lock", "x.json"]
    assert state.claim(b / "secrets" / "key", "of b", private=True) == b"of a"
    assert (b / "secrets" / "key").stat().st_mode & 0o077 == 0
    state.drop(b / "run" / "model")

    become(monkeypatch, a, url)
    assert state.bring(a / "audit" / "lines").read_text() == "one\ntwo\nthree\n"
    state.bring(a / "run", exact=True)
    assert sorted(path.name for path in (a / "run").iterdir()) == [".hidden", "deep", "uv.lock"]


def test_a_damaged_copy_of_a_segment_is_brought_again_and_what_is_shared_stays(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, tmp_path, url)
    for ids in ("abc", "def"):
        with open_log(tmp_path) as opened:
            opened.served(batch_of(frame(3), list(ids)))
    segments = sorted(model_folder(tmp_path, MODEL).glob("day=*/*.parquet"))
    segments[0].write_bytes(bytes(segments[0].stat().st_size))
    monkeypatch.setattr("tasks.kernel.settings.SMALL_BYTES", 0)  # so its size alone is compared
    with SegmentWriter(tmp_path) as writer:
        keep_up(tmp_path, writer, PredictionLogConfig(), NOW + timedelta(days=2))
    assert len(rows_of(tmp_path, ["request_id"])) == 6
    assert not list((tmp_path / "predictions" / "damaged").iterdir())


@pytest.mark.parametrize(
    "wrong",
    "lake/x http://host/x s3:///x file://host/x s3://k:hunter2@lake/x file:/// file:///x#2".split(),
)
def test_what_is_no_location_is_refused_without_showing_a_password(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="expected file:///folder or s3://") as refused:
        Location.of(wrong)
    assert "hunter2" not in str(refused.value)


def test_wrong_keys_and_a_bucket_that_is_not_there_are_told(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        Location.of("s3://nowhere/x").write("a", b"")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorageError, match="refused the key") as refused:
        Location.of(bucket).read("a")
    assert "wrong" not in str(refused.value)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigurationError, match="is set, the other is not"):
        Location.of(bucket).read("a")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("Error performing PUT http://169.254.169.254/latest/api/token", "set AWS_ACCESS_KEY_ID"),
        ("status code: 403 <Code>RequestTimeTooSkewed</Code>", "set this machine's clock"),
        ('store: "LocalFileSystem",\n Os { code: 122, (os error 122)', "the store is full"),
    ],
)
def test_what_waiting_does_not_mend_is_told_with_what_does(
    answer: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise GenericError(answer)

    monkeypatch.setattr(Location, "_opened", refuse)
    with pytest.raises(StorageError, match=words):
        Location.of("s3://lake/x").read("a")


def test_a_folder_of_a_team_stays_open_and_one_that_may_not_be_written_is_told(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o2775)
    Location.of(tmp_path.as_uri()).write("a", b"1")
    assert tmp_path.stat().st_mode & 0o7777 == 0o2775
    with pytest.raises(StorageError, match=r"file:///sys/kernel/a: .* mounted for writing"):
        Location.of("file:///sys/kernel").write("a", b"")


def test_the_largest_object_of_s3_goes_in_no_more_parts_than_s3_takes() -> None:
    assert 5 * 1024**4 / part_bytes(5 * 1024**4) < 10_000
    assert part_bytes(300_000_000) == 8_000_000


def test_a_store_that_is_away_is_waited_for_and_then_named(
    monkeypatch: pytest.MonkeyPatch, bucket: str
) -> None:
    monkeypatch.setattr("tasks.kernel.location.RETRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TransientError, match=r"lake/.*/a: the store does not answer"):
        Location.of(bucket).read("a")


@pytest.mark.slow
def test_a_full_store_refuses_and_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3: str
) -> None:
    with s3_server("-volume.max=1", "-master.volumeSizeLimitMB=1") as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        monkeypatch.setattr("tasks.kernel.location.RETRIES", 1)
        make_bucket(endpoint, "lake")
        store = ArtifactStore(tmp_path / "a", Location.of("s3://lake/small"))
        notes = build_notes(store, "whole")
        with pytest.raises((StorageError, TransientError), match="s3://lake/small/"):
            build_many(store)
        other = ArtifactStore(tmp_path / "b", Location.of("s3://lake/small"))
        assert other.path(notes.text).read_text() == "whole"


def test_a_store_that_is_slow_busy_and_breaks_off_is_asked_again_and_loses_nothing(
    wrong: WrongStore, bucket: str, tmp_path: Path
) -> None:
    here, there = (ArtifactStore(tmp_path / name, Location.of(bucket)) for name in ("a", "b"))
    wrong.delay_s, wrong.busy, wrong.cuts = 0.05, 2, 2
    made = build_notes(here)
    assert (wrong.busy, wrong.cuts) == (0, 0)
    wrong.busy = 1
    assert there.path(build_notes(there, "another").text).read_text() == "hello"
    assert made == build_notes(there)
    assert here.num_builds == 1


def test_a_download_that_breaks_off_goes_on_where_it_was(
    wrong: WrongStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.kernel.location.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("tasks.kernel.location.RETRIES", 1)  # between two breaks bytes came
    location, content = Location.of(bucket), random.Random(1).randbytes(800_000)
    location.write("a", content)
    wrong.sent_bytes, wrong.breaks = 0, 6
    location.bring("a", tmp_path / "a")
    assert (wrong.breaks, (tmp_path / "a").read_bytes()) == (0, content)
    assert wrong.sent_bytes < 2 * len(content)


def test_an_upload_that_is_never_finished_shows_nothing(
    wrong: WrongStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.kernel.location.RETRIES", 0)
    here, there = (ArtifactStore(tmp_path / name, Location.of(bucket)) for name in ("a", "b"))
    for number in range(4):  # the uploads of three files, and of the record that names them
        wrong.cuts = 1 if number == 0 else 0
        wrong.busy = 0
        with suppress(TransientError):
            build_notes(here, f"text {number}")
        if number == 0:
            assert there.folders("notes") == []
            assert not (here.root / "notes" / "k").exists()
    assert there.path(build_notes(there, "later").text).read_text() == "text 1"


def test_old_listings_hide_nothing_that_is_asked_for_by_name(
    wrong: WrongStore, bucket: str, tmp_path: Path
) -> None:
    here, there = (ArtifactStore(tmp_path / name, Location.of(bucket)) for name in ("a", "b"))
    build_notes(here, "first", "k1")
    assert [folder.name for folder in there.folders("notes")] == ["k1"]
    wrong.old_listings = True
    made = build_notes(here, "second", "k2")
    assert build_notes(there, "not built", "k2") == made
    assert there.path(made.text).read_text() == "second"
    wrong.old_listings = False
    assert [folder.name for folder in there.folders("notes")] == ["k1", "k2"]


def test_a_store_that_knows_no_conditions_is_refused_before_anything_relies_on_them(
    wrong: WrongStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, tmp_path / "home", bucket)
    wrong.unconditional = True
    with pytest.raises(ConfigurationError, match="conditional writes"):
        state_identity(Settings.from_environment())
    wrong.unconditional = False
    assert state_identity(Settings.from_environment())


def test_copies_of_another_state_are_noticed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, tmp_path / "a", url)
    first = state_identity(Settings.from_environment())
    assert state_identity(Settings.from_environment()) == first
    become(monkeypatch, tmp_path / "b", url)
    other = state_identity(Settings.from_environment())
    assert other.split(".")[0] == first.split(".")[0]
    assert other.split(".")[1] != first.split(".")[1], "each has a database of its own"
    monkeypatch.setenv("FALAJ_EXPECTED_STATE", first)
    with pytest.raises(ConfigurationError, match=r"database differ.*FALAJ_DATABASE_URL"):
        check_state(Settings.from_environment())
    become(monkeypatch, tmp_path / "b", f"{url}-another")
    with pytest.raises(ConfigurationError, match="holds copies of the state"):
        check_state(Settings.from_environment())
    become(monkeypatch, tmp_path / "b", url)
    name = Location.of(url).read("identity") or b""
    Location.of(url).remove(["identity"])  # as where it is not mounted
    with pytest.raises(ConfigurationError, match="Mount it if it is not mounted"):
        check_state(Settings.from_environment())
    assert not Location.of(url).entries("")
    Location.of(url).write("identity", name)
    become(monkeypatch, tmp_path / "a", url)
    monkeypatch.delenv("FALAJ_STATE")
    with pytest.raises(ConfigurationError, match=r"location differ.*FALAJ_STATE"):
        check_state(Settings.from_environment())


def test_a_copy_that_gets_a_location_is_not_what_it_was_copied_from(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = state_identity(Settings(tmp_path / "first", tmp_path))
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    become(monkeypatch, tmp_path / "copy", url)
    other = state_identity(Settings.from_environment())
    assert other.partition(".")[0] != first.partition(".")[0]


def test_from_python_a_project_reads_what_machines_share(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become(monkeypatch, tmp_path / "a", url)
    state.put(tmp_path / "a" / "reports" / "newest", "run-1")
    state.put(tmp_path / "a" / "reports" / "run-1" / "report.json", "{}")
    monkeypatch.delenv("FALAJ_STATE")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "use_case.yaml").write_text("name: flights")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "server.yaml").write_text(f"state: {url}")
    project = falaj.open(tmp_path / "project", tmp_path / "b")
    assert project.settings.location == Location.of(url)
    assert (project.settings.latest_report() / "report.json").read_text() == "{}"


def test_a_look_makes_no_folder(tmp_path: Path) -> None:
    location = Location.of((tmp_path / "mistyped").as_uri())
    assert (location.read("a"), location.size("a"), location.entries("")) == (None, None, {})
    location.remove(["a"])
    assert not (tmp_path / "mistyped").exists()
    assert location.create("a", b"1")
    assert (tmp_path / "mistyped").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["../../outside", "/outside", "pages/../../../outside", "."])
def test_a_record_that_names_a_file_outside_its_build_is_not_followed(
    url: str, tmp_path: Path, name: str
) -> None:
    here, there = (ArtifactStore(tmp_path / each, Location.of(url)) for each in ("a", "b"))
    made = build_notes(here)
    assert here.location is not None
    record = json.loads(here.location.read("artifacts/notes/k.json") or b"")
    record["files"][name] = record["files"]["note.txt"]
    here.location.write("artifacts/notes/k.json", json.dumps(record).encode())
    with pytest.raises(ArtifactError, match="run the stage that makes it again"):
        there.path(made.text)
    assert [path for path in tmp_path.rglob("outside*")] == []


def test_a_copied_folder_is_another_state_and_a_moved_one_is_the_same(tmp_path: Path) -> None:
    home = tmp_path / "first"
    first = state_identity(Settings(home, tmp_path))
    assert state_identity(Settings(home, tmp_path)) == first
    home = home.rename(tmp_path / "moved")
    assert state_identity(Settings(home, tmp_path)) == first
    assert not [*check_copy(home)]

    copy = Path(shutil.copytree(home, tmp_path / "copy"))
    assert [f.level for f in check_copy(copy)] == ["ok"], "the original is not where it was made"
    home.rename(tmp_path / "first")
    (seen,) = check_copy(copy)
    assert (seen.level, f"from {home.parent / 'first'}, which" in seen.seen) == ("warning", True)
    other = state_identity(Settings(copy, tmp_path))
    assert other.split(".")[0] != first.split(".")[0]
    assert not [*check_copy(copy)]
    assert state_identity(Settings(tmp_path / "first", tmp_path)) == first
    (copy / "identity").write_bytes(b"\xff damaged")
    assert state_identity(Settings(copy, tmp_path)).split(".")[0] not in (first, other)
