"""Whatever a state holds, pruning removes nothing needed, and says before what it removes."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore

from tasks.contracts.base import Artifact, Contract
from tasks.kernel.errors import ConfigurationError, TransientError
from tasks.kernel.location import Location
from tasks.kernel.settings import ArtifactStore, Settings, StagedFolder
from tasks.metadata.database import open_database, transaction
from tasks.metadata.tables import models
from tasks.state.backup import KILLED_AFTER_S, back_up, list_backups, read_backup, under_way, verify
from tasks.state.prune import SMALL_BUILD, Pruning, plan_pruning, prune
from tests.support.suite.examples import examples

KEEP = 2
Plan = tuple[str, int, set[int], str]
PLAN = st.tuples(
    st.sampled_from(("snapshots", "tables", "scores")),
    st.sampled_from((10, 2 * SMALL_BUILD, 2 * SMALL_BUILD)),
    st.sets(st.integers(1, 8), max_size=2),
    st.sampled_from(("champion", "track", "audit", "published", "report", "report", "", "")),
)


class Made(Contract):
    """A build, and URIs of those that it was made from."""

    file: Artifact
    made_from: tuple[str, ...] = ()


class State:
    """Builds of some kind and size, each made from earlier ones, and what needs it."""

    def __init__(self, folder: Path, plans: list[Plan], shared: bool) -> None:
        self.folder, self.plans, self.home = folder, plans, folder / "home"
        location = Location.of((folder / "the lake").as_uri()) if shared else None
        self.settings = Settings(self.home, folder, location=location)
        self.place = location or Location(self.home.as_uri())
        self.target = Location.of((folder / "backups").as_uri())
        self.made: list[Made] = []
        open_database(self.settings.metadata_url)
        for number, plan in enumerate(plans):
            self.build(number, *plan)
        for name in ("results/a", "computed/t/a", "edge/a.log.1", "shop/a.log", "edge/a.logs"):
            place = self.place if "log" not in name else Location(self.home.as_uri())
            place.write(name, b"{}")

    def build(self, number: int, kind: str, size: int, backs: set[int], root: str) -> None:
        named = tuple(self.made[number - back].file.uri for back in backs if back <= number)

        def write(folder: StagedFolder) -> Made:
            (folder.path / "data").write_text(f"{number} " * size)
            return Made(file=folder.artifact("data"), made_from=named)

        self.made.append(self.settings.store.build_once(kind, f"{number:020x}", Made, write))
        uri = self.made[-1].file.uri
        if root == "track":
            with transaction(open_database(self.settings.metadata_url)) as connection:
                connection.execute(models.insert().values(model=uri))
        elif root:
            name = {
                "champion": f"mlflow/artifacts/1/{number}/model.json",
                "audit": f"audit/models-{number}.jsonl",
                "published": f"use_cases/{number}/feature_tables/published",
                "report": f"reports/{number:04}/report.json",
            }[root]
            self.place.write(name, (uri if root != "published" else f"{number:020x}").encode())

    def needed(self) -> set[str]:
        """URIs of what something needs, and of all that this was made from."""
        roots = [(root, kind) for kind, _, _, root in self.plans]
        reports = [n for n, (root, _) in enumerate(roots) if root == "report"]
        found = {
            self.made[n].file.uri
            for n, (root, kind) in enumerate(roots)
            if root in ("champion", "track", "audit")
            or (root, kind) == ("published", "tables")
            or n in reports[-KEEP:]
        }
        for made in reversed(self.made):  # each is made from earlier ones
            found |= {*made.made_from} if made.file.uri in found else set()
        return found

    def plan(self) -> Pruning:
        return plan_pruning(self.settings, KEEP, timedelta(), self.target)

    def files(self) -> set[str]:
        """All that is there, but for databases and what only waits to be removed."""
        names = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*")}
        there = {name for name in names if (self.folder / name).is_file()}
        return {name for name in there if "/." not in name and "/operation/" not in name}

    def check(self) -> None:
        """What is needed is whole, on another machine too, and so is each kept backup."""
        with TemporaryDirectory() as other:
            location, store = self.settings.location, self.settings.store
            store = ArtifactStore(Path(other), location) if location else store
            for made in self.made:
                kind, key, _ = made.file.uri.removeprefix("artifact:").split("/")
                if made.file.uri in self.needed():
                    assert store.find(kind, key, Made) == made
                    assert store.path(made.file, verify=True)
        for name in list_backups(self.target)[-KEEP:]:
            verify(self.target, read_backup(self.target, name))


def falling(real: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    """A function that is cut off before its n-th call, of all that count together."""

    def call(*given: Any, **options: Any) -> Any:
        if next(left) == 0:
            raise KeyboardInterrupt
        return real(*given, **options)

    return call


@settings(examples(12), phases=(Phase.generate,))  # to shorten an example takes minutes
@given(st.lists(PLAN, min_size=4, max_size=9), st.booleans(), st.integers(0, 3), st.integers(0, 25))
def test_a_prune_removes_what_it_has_shown_and_nothing_that_is_needed(
    plans: list[Plan], shared: bool, num_backups: int, cut_at: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.state.prune.UPLOAD_LIMIT", timedelta())
        state, left = State(Path(folder), plans, shared), count(cut_at, -1)
        for number in range(num_backups):
            back_up(state.settings, state.target, {}, lambda _: None)
            state.place.write(f"predictions/{number}", str(number).encode())
        before, found = state.files(), state.plan()
        named = {(place.folder / n).as_posix() for place, n in found.results | found.objects}  # type: ignore[operator]
        shown = [*found.builds, *found.backups, *map(str, found.logs), *named]
        expected = {each for each in before if any(name in f"{folder}/{each}" for name in shown)}
        assert state.files() == before, "a look changes nothing"
        assert [path.name for path in found.logs] == ["a.log.1"]

        with patch.context() as cut, suppress(KeyboardInterrupt):
            for place, function in ((Path, "rename"), (Path, "unlink"), (LocalStore, "delete")):
                cut.setattr(place, function, falling(getattr(place, function), left))
            prune(state.settings, found, state.target)
        assert before - state.files() <= expected
        state.check()

        prune(state.settings, state.plan(), state.target)
        assert before - state.files() == expected
        state.check()
        assert state.plan() == Pruning()


def test_a_backup_and_a_prune_of_its_place_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(tmp_path, [("snapshots", 10, set(), "report")], shared=False)
    with under_way(state.target, "backup") as sign:
        back_up(state.settings, state.target, {}, lambda _: None)  # backups go along
        with pytest.raises(TransientError, match=r"a backup of .* beside this prune"):
            prune(state.settings, state.plan(), state.target)
        monkeypatch.setitem(KILLED_AFTER_S, "backup", -1)
        prune(state.settings, state.plan(), state.target)  # it counts as killed
        with pytest.raises(TransientError, match="a prune is under way or was"):
            sign(True)  # so it writes no list
    with under_way(state.target, "prune"), pytest.raises(TransientError, match="this backup"):
        back_up(state.settings, state.target, {}, lambda _: None)


def test_a_location_is_not_pruned_by_what_another_database_names(tmp_path: Path) -> None:
    state = State(tmp_path, [("snapshots", 10, set(), "track")], shared=True)
    state.place.write(f"mlflow/artifacts/1/models/m-{'a' * 32}/artifacts/model.onnx", b"")
    for there in (state.settings, replace(state.settings, home=tmp_path / "without one")):
        with pytest.raises(ConfigurationError, match="no database, or one without its 1 runs"):
            plan_pruning(there, 1, timedelta(), None)
