"""What of a state may go: builds that nothing names any more, old logs, results and backups.

One pass from the roots: registered versions, published tables, the newest reports, what the
databases and the audit trails name. What these name is kept, and what that names; so is what was
made from it, such as the scores of a model that is kept. Builds of the last days are kept whatever
names them, since a run may be about to.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from tasks.kernel import files
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.location import OBJECTS, Location
from tasks.kernel.settings import ARTIFACTS, STAGING, VALUE, Build, Settings
from tasks.state.backup import list_backups, read_backup, under_way
from tasks.state.contents import BACKUPS, LOCAL, MODELS, OTHERS, POINTERS, Source, contents
from tasks.state.databases import all_text, name_of_state

Key = tuple[str, str]
Objects = dict[tuple[Location, str], int]
_URI = re.compile(r"artifact:([\w-]+)/([\w-]+)/")
_DIGEST = re.compile(r'"(?:[a-z_]*sha256|tables_version|version)": ?"([0-9a-f]{32,64})"')
_CLASS = re.compile(r'"data_class": ?"([a-z]+)"')
_LOG = re.compile(r"\.log(\.\d+)?$")
_RUN = re.compile(r"(?<=/)(?:m-)?[0-9a-f]{32}(?=/)")
_VERSION_OF_TABLES = re.compile(r"tables/([0-9a-f]{16,})")
SOURCES = {"tables", "landed"}
"""Kinds whose versions repeat content; that content is the same tells nothing about them."""
SMALL_BUILD = 100_000
PASSED = ("results", "computed", "prefect/results", "platform/prefect/results")
"""Results of Prefect's runs, and what a computation that was killed has left."""
UPLOAD_LIMIT = timedelta(days=1)
"""Content that nothing names is kept for so long: what names it may be on its way."""


@dataclass
class Pruning:
    """What would go, by kind.

    Attributes:
        builds: folders or objects of builds, with their bytes.
        logs: files of services.
        results: objects of the state folder and the location whose runs are long over.
        backups: names of backups.
        objects: content of a location that nothing names then.
    """

    builds: dict[str, int] = field(default_factory=dict)
    logs: dict[Path, int] = field(default_factory=dict)
    results: Objects = field(default_factory=dict)
    backups: list[str] = field(default_factory=list)
    objects: Objects = field(default_factory=dict)


@dataclass(frozen=True)
class _Build:
    text: str
    num_bytes: int
    finished: datetime


def plan_pruning(
    settings: Settings,
    keep: int,
    age: timedelta,
    backups: Location | None,
    retention: Mapping[Any, int] = MappingProxyType({}),
) -> Pruning:
    """Find what may go; nothing is changed.

    Args:
        keep: newest reports of each use case, and backups, that are kept with all they name.
        age: whatever is younger is kept.
        backups: location whose backups are pruned too.
        retention: data class to days. Rows of a class are kept no longer, whatever names them.

    Raises:
        ConfigurationError: the database is not that of the location.
    """
    found, oldest = Pruning(), datetime.now(UTC) - max(age, UPLOAD_LIMIT)
    builds = dict(_builds(settings))
    live = _live(builds, _roots(settings, keep), oldest) - {*_expired(builds, retention)}
    found.builds = {"/".join(key): builds[key].num_bytes for key in sorted(builds.keys() - live)}
    for path in (each for folder in LOCAL for each in (settings.home / folder).rglob("*.log*")):
        seen = path.lstat()
        if _LOG.search(path.name) and path.is_file() and seen.st_mtime < oldest.timestamp():
            found.logs[path] = seen.st_size
    here = Location(settings.home.as_uri(), plain=True)
    found.results = {
        (place, name): entry.num_bytes
        for place in {here, settings.location or here}
        for prefix in PASSED
        for name, entry in place.entries(prefix).items()
        if entry.changed < oldest
    }
    if backups is not None:
        found.backups = list_backups(backups, name_of_state(settings))[:-keep]
    for location in filter(None, {settings.location, backups}):
        found.objects |= _unnamed(location, found, settings)
    return found


def prune(settings: Settings, found: Pruning, backups: Location | None) -> None:
    """Remove what was found: what names content before the content.

    Raises:
        TransientError, StorageError: a store does not answer, or refuses; prune again then. Or a
            backup is made into one of the locations.
    """
    with ExitStack() as held:
        places = filter(None, {settings.location, backups})
        signs = {place: held.enter_context(under_way(place, "prune")) for place in places}
        for name in found.builds:
            folder = settings.home / ARTIFACTS / name
            if settings.location is not None:
                settings.location.remove([f"{ARTIFACTS}/{name}.json"])
            if folder.exists():  # what is left of it where this is cut off is removed by the next
                with files.scratch_folder(STAGING, folder.parent) as aside:
                    folder.rename(aside / folder.name)
        for path in found.logs:
            path.unlink(missing_ok=True)
        for place, name in found.results:
            place.remove([name])
        if backups is not None:
            backups.remove(f"{BACKUPS}/{name}.json" for name in found.backups)
        for location, sign in signs.items():
            still = _unnamed(location, found, settings)
            sign(True)  # reading all records may have taken long
            for _, name in still.keys() & found.objects.keys():
                sign()
                location.remove([name])


def sizes_of_builds(settings: Settings) -> list[tuple[datetime, int]]:
    """When each build that is there was finished, and its bytes."""
    return [(build.finished, build.num_bytes) for build in dict(_builds(settings)).values()]


def _builds(settings: Settings) -> Iterator[tuple[Key, _Build]]:
    for value in settings.store.root.glob(f"[!.]*/[!.]*/{VALUE}"):
        folder = value.parent
        finished = datetime.fromtimestamp(value.stat().st_mtime, UTC)
        text = value.read_text(encoding="utf-8")
        yield (folder.parent.name, folder.name), _Build(text, files.size_of(folder), finished)
    for name, build in shared_builds(settings.location):
        path = PurePosixPath(name)
        size = sum(num_bytes for _, num_bytes in build.files.values())
        yield (path.parent.name, path.stem), _Build(json.dumps(build.value), size, build.finished)


def shared_builds(location: Location | None) -> Iterator[tuple[str, Build]]:
    """Records of builds that a location has, by the names of their objects."""
    for name in location.entries(ARTIFACTS) if location is not None else ():
        if name.endswith(".json") and (content := location.read(name)):  # type: ignore[union-attr]
            yield name, Build.model_validate_json(content)


def _roots(settings: Settings, keep: int) -> Iterator[str]:
    """Text that names what has to stay."""
    runs, is_known = set[str](), settings.location is None
    for name, source in contents(settings, MODELS):
        runs.update(_RUN.findall(name))
        if name.endswith(".json"):
            yield _text(source)
    for text in all_text(settings):
        is_known = is_known or not runs or not runs.isdisjoint(text.split("\n"))
        yield text
    if not is_known:
        raise ConfigurationError(
            f"{settings.location}: this process has no database, or one without its {len(runs)} "
            "runs; set FALAJ_DATABASE_URL as its other machines have it. Nothing was changed"
        )
    for name, source in contents(settings, POINTERS):
        if isinstance(source, Path) and source.is_symlink():
            pointed = source.readlink().as_posix()
        else:
            pointed = f"tables/{_text(source)}" if name.endswith("published") else ""
        yield from (f"artifact:tables/{key}/" for key in _VERSION_OF_TABLES.findall(pointed))
    reports: dict[str, list[tuple[str, Source]]] = {}
    for name, source in contents(settings, OTHERS):
        path = PurePosixPath(name)
        if path.parent.name == "audit":
            yield _text(source)
        if path.name == "report.json" and path.parent.parent.name == "reports":
            reports.setdefault(str(path.parent.parent), []).append((name, source))
    for each in reports.values():
        yield from (_text(source) for _, source in sorted(each, key=lambda r: r[0])[-keep:])


def _text(source: Source) -> str:
    if isinstance(source, Path):
        return source.read_text(encoding="utf-8", errors="replace")
    content = source if isinstance(source, bytes) else source.location.read(source.name) or b""
    return content.decode(errors="replace")


def _live(builds: dict[Key, _Build], roots: Iterator[str], oldest: datetime) -> set[Key]:
    live = {key for text in roots for key in _URI.findall(text) if key in builds}
    live |= {key for key, build in builds.items() if build.finished >= oldest}
    live |= {k for k, b in builds.items() if b.num_bytes < SMALL_BUILD and k[0] not in SOURCES}
    while True:
        told = {
            digest
            for key in live
            for digest in _DIGEST.findall(builds[key].text)
            if key[0] not in SOURCES or f'"version": "{digest}"' in builds[key].text
        }
        named = {key for k in live for key in _URI.findall(builds[k].text) if key in builds}
        made_from = {
            key
            for key in builds.keys() - live
            if key[0] not in SOURCES and told & {*_DIGEST.findall(builds[key].text)}
        }
        if (named | made_from) <= live:
            return live
        live |= named | made_from


def _expired(builds: dict[Key, _Build], retention: Mapping[Any, int]) -> Iterator[Key]:
    """Builds that hold rows of a class for longer than its rows may be kept."""
    for key, build in builds.items():
        days = [retention[each] for each in _CLASS.findall(build.text) if each in retention]
        if days and build.finished < datetime.now(UTC) - timedelta(days=min(days)):
            yield key


def remove_unnamed(location: Location, settings: Settings) -> None:
    """Remove content that nothing names, however new; to be called while nobody sends any."""
    unnamed = _unnamed(location, Pruning(), settings, datetime.now(UTC))
    location.remove(name for _, name in unnamed)


def _unnamed(
    location: Location, found: Pruning, settings: Settings, oldest: datetime | None = None
) -> Objects:
    """Content of a location that no build or backup names which stays."""
    gone = {f"{ARTIFACTS}/{name}.json" for name in found.builds}
    named = set()
    for name, build in shared_builds(location):
        if name not in gone or location != settings.location:
            named |= {sha256 for sha256, _ in build.files.values()}
    for name in list_backups(location):
        if name not in found.backups:
            named |= {kept.sha256 for kept in read_backup(location, name).files.values()}
    oldest = oldest or datetime.now(UTC) - UPLOAD_LIMIT
    return {
        (location, name): entry.num_bytes
        for name, entry in location.entries(OBJECTS).items()
        if PurePosixPath(name).name not in named and entry.changed < oldest
    }
