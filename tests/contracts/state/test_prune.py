"""Whatever a state holds, pruning removes nothing needed, and says before what it removes."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import obstore
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tasks.contracts.base import Artifact, Contract
from tasks.kernel.location import Location, object_name
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder
from tasks.metadata.database import open_database, transaction
from tasks.metadata.tables import models
from tasks.state.backup import back_up, list_backups, read_backup, verify
from tasks.state.prune import SMALL_BUILD, Pruning, plan_pruning, prune

KEEP, AGE = 2, timedelta(days=30)
KINDS = ("snapshots", "tables", "models", "scores")
ROOTS = ("champion", "track", "audit", "report", "published")


class Made(Contract):
    """A build that was made from others."""

    file: Artifact
    made_from: tuple[str, ...] = ()


PLANS = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "large": st.booleans(),
            "old": st.integers(0, 3).map(bool),
            "made_from": st.sets(st.integers(1, 8), max_size=2),
            "root": st.sampled_from((*ROOTS, "", "", "", "")),
        }
    ),
    min_size=1,
    max_size=8,
)


class State:
    """A state with these builds, and what each of them names."""

    def __init__(self, folder: Path, plans: list[dict[str, Any]], template: Path, shared: bool):
        url = (folder / "lake of all").as_uri()
        location = Location.of(url) if shared else None
        self.settings = Settings(folder / "home", folder, location=location)
        self.folder, self.plans, self.names = folder, plans, list[str]()
        self.target = Location.of((folder / "backups").as_uri())
        (self.settings.home / "operation").mkdir(parents=True)
        shutil.copyfile(template, self.settings.metadata_file)
        self.store = self.settings.store
        self.made = [self.build(number, plan) for number, plan in enumerate(plans)]
        for number, plan in enumerate(plans):
            self.name(plan["root"], number)
        for prefix in ("results", "computed/t", "platform/prefect/results"):
            for name in ("old", "young"):
                self.write(f"{prefix}/{name}", "{}")
        self.write("platform/logs/old.log", "x")
        self.set_ages()

    def build(self, number: int, plan: dict[str, Any]) -> Made:
        kind, key = plan["kind"], f"{number:020x}"
        self.names.append(f"{kind}/{key}")
        earlier = [number - back for back in sorted(plan["made_from"]) if back <= number]
        named = tuple(f"artifact:{self.names[each]}/data" for each in earlier)

        def write(folder: StagedFolder) -> Made:
            size = 2 * SMALL_BUILD if plan["large"] else 10
            (folder.path / "data").write_text(str(number) * size)
            return Made(file=folder.artifact("data"), made_from=named)

        return self.store.build_once(kind, key, Made, write)

    def name(self, root: str, number: int) -> None:
        """Name a build as what needs it does."""
        uri = self.made[number].file.uri
        if root == "champion":
            self.write(f"mlflow/artifacts/1/{number}/model.json", f'{{"uri": "{uri}"}}')
        elif root == "track":
            with transaction(open_database(self.settings.metadata_url)) as connection:
                connection.execute(models.insert().values(model=uri))
        elif root == "audit":
            self.write(f"audit/models-{number}.jsonl", f'{{"subject": "{uri}"}}\n')
        elif root == "report":
            self.write(f"reports/2026{number:04}/report.json", f'{{"uri": "{uri}"}}')
        elif root == "published" and self.plans[number]["kind"] == "tables":
            self.write(f"use_cases/u{number}/feature_tables/published", uri.split("/")[1])

    def write(self, name: str, text: str) -> None:
        place = self.settings.location
        if place is not None and not name.startswith("platform"):
            place.write(name, text.encode())
        else:
            (self.settings.home / name).parent.mkdir(parents=True, exist_ok=True)
            (self.settings.home / name).write_text(text)

    def set_ages(self) -> None:
        """All is of long ago, but for what is to be young."""
        then = (datetime.now(UTC) - 2 * AGE).timestamp()
        young = {n for n, plan in zip(self.names, self.plans, strict=True) if not plan["old"]}
        for file in self.folder.rglob("*"):
            if file.is_file() and file.name != "young" and file.parent.name != "operation":
                if not any(name in str(file) for name in young):
                    os.utime(file, (then, then))
        place = self.settings.location
        for name in set(self.names) - young if place else ():
            record = place.folder / "artifacts" / f"{name}.json"  # type: ignore[union-attr, operator]
            text = record.read_text().partition('"finished"')[0]
            moment = datetime.fromtimestamp(then, UTC).isoformat()
            record.write_text(f'{text}"finished":"{moment}"}}')

    def needed(self) -> set[int]:
        """Builds that something needs, and all that they name."""
        reports = [n for n, plan in enumerate(self.plans) if plan["root"] == "report"]
        found = {
            number
            for number, plan in enumerate(self.plans)
            if not plan["old"]
            or plan["root"] in ("champion", "track", "audit")
            or (plan["root"] == "published" and plan["kind"] == "tables")
            or (plan["root"] == "report" and number in reports[-KEEP:])
        }
        while (
            more := {
                self.names.index(uri.removeprefix("artifact:").removesuffix("/data"))
                for number in found
                for uri in self.made[number].made_from
            }
            - found
        ):
            found |= more
        return found

    def plan(self) -> Pruning:
        return plan_pruning(self.settings, KEEP, AGE, self.target)

    def files(self) -> set[str]:
        """All that is there, but for what only waits to be removed."""
        there = (path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*"))
        passing = ("/.", "/operation/")
        return {
            n for n in there if not any(p in n for p in passing) and (self.folder / n).is_file()
        }

    def check(self) -> None:
        """What is needed is whole, and so is each backup that is kept."""
        fresh = ArtifactStore(self.folder / "elsewhere", self.settings.location)
        for number in self.needed():
            for store in (self.store, fresh if self.settings.location else self.store):
                assert store.find(*self.names[number].split("/"), Made), self.names[number]
                assert store.path(self.made[number].file, verify=True).is_file()
        shutil.rmtree(self.folder / "elsewhere", ignore_errors=True)
        assert (self.settings.home / "platform/prefect/results/young").exists()
        for name in list_backups(self.target)[-KEEP:]:
            verify(self.target, read_backup(self.target, name))


def would_remove(state: State, found: Pruning) -> Iterator[str]:
    """Files that a plan names."""
    home = state.settings.home.relative_to(state.folder).as_posix()
    place = state.settings.location
    shared = place.folder.relative_to(state.folder).as_posix() if place and place.folder else ""
    for name in found.builds:
        yield from (n for n in state.files() if n.startswith(f"{home}/artifacts/{name}/"))
        if shared:
            yield f"{shared}/artifacts/{name}.json"
    yield from (path.relative_to(state.folder).as_posix() for path in found.logs)
    for where, name in {**found.passed, **found.objects}:
        assert where.folder is not None
        yield (where.folder / name).relative_to(state.folder).as_posix()
    yield from (f"backups/backups/{name}.json" for name in found.backups)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("new") / "operation.db"
    open_database(f"sqlite:///{file}").dispose()
    return file


def falling(real: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    """A function that is cut off before its n-th call, of all that count together."""

    def call(*given: Any, **options: Any) -> Any:
        if next(left) == 0:
            raise KeyboardInterrupt
        return real(*given, **options)

    return call


@settings(
    max_examples=20,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plans=PLANS, shared=st.booleans(), num_backups=st.integers(0, 3), cut_at=st.integers(0, 25))
def test_a_prune_removes_what_it_has_shown_and_nothing_that_is_needed(
    template: Path, plans: list[dict[str, Any]], shared: bool, num_backups: int, cut_at: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        state = State(Path(folder), plans, template, shared)
        for number in range(num_backups):
            back_up(state.settings, state.target, {}, lambda _: None)
            state.write(f"reports/note{number}", f"since then {number}")
        state.set_ages()
        before, found = state.files(), state.plan()
        expected = {*would_remove(state, found)}
        assert state.files() == before, "a look changes nothing"

        left = count(cut_at, -1)
        with patch.context() as cut, suppress(KeyboardInterrupt):
            cut.setattr(Path, "rename", falling(Path.rename, left))
            cut.setattr(Path, "unlink", falling(Path.unlink, left))
            cut.setattr(obstore, "delete", falling(obstore.delete, left))
            prune(state.settings, found, state.target)
        assert before - state.files() <= expected
        state.check()

        before = state.files() | expected
        prune(state.settings, state.plan(), state.target)
        assert before - state.files() == expected
        state.check()
        assert state.plan() == Pruning()


def test_content_that_two_builds_share_stays_while_one_of_them_does(
    template: Path, tmp_path: Path
) -> None:
    plan = {"kind": "models", "large": True, "old": True, "made_from": set(), "root": ""}
    state = State(tmp_path, [plan, {**plan, "root": "champion"}], template, True)
    place = state.settings.location
    assert place is not None
    record = place.read(f"artifacts/{state.names[1]}.json")
    assert record is not None
    place.write(f"artifacts/{state.names[0]}.json", record)
    prune(state.settings, state.plan(), state.target)
    assert place.size(object_name(state.made[1].file.sha256))
    state.check()
