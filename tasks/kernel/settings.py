"""Where things are: state folder and services, from the environment; and the artifact store.

Nothing here says what to do; that is a `Config`. Importing this module reads nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, field_validator

from tasks.kernel import files
from tasks.kernel.code_digest import statements_digest
from tasks.kernel.errors import ArtifactError, ConfigurationError, refused_writes_explained
from tasks.kernel.keys.address import named_keys
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.signed import read_signed
from tasks.kernel.keys.store import EVIDENCE
from tasks.kernel.location import Entry, Location, object_name
from tasks.kernel.parts import PARTIAL, PARTS_FILE, PartialCopy, RemoteFile, described
from tasks.kernel.parts import SHARED as SHARED
from tasks.kernel.process import ProcessName
from tasks.kernel.tenants import TENANT, installation_of, own_tenant, tenant_home, tenant_of
from tasks.kernel.values import Artifact, items_of

PROJECT_ROOT = Path(__file__).resolve().parents[2]
"""Folder of `falaj`, `flows`, `tasks` and the others: the checkout, or that of an installation."""
URI_SCHEME = "artifact:"
ARTIFACTS = "artifacts"
MLFLOW_SCHEMA = "mlflow"
STAGING = ".staging"
"""Beginning of the names of folders that are being built, beside those that are finished."""
DEFAULT_PROFILE = "local"
DEFAULT_FEATURE_REPO = Path("feature_repo") / "flights"
USE_CASE_FILE = "use_case.yaml"
SERVER_FILE = "server.yaml"
SERVER_NAMES = {
    "state": "FALAJ_STATE",
    "database": "FALAJ_DATABASE_URL",
    "redis": "FALAJ_REDIS",
    "registry": "FALAJ_REGISTRY_URL",
    "keys": "FALAJ_KEYS",
}
"""What a server's file may name, and the variables for which it stands."""
NAME_ONE = "begin a project with `falaj init`, or name one: --project PATH, or FALAJ_FEATURE_REPO"
BUILD_LOG = "builds.jsonl"
"""File of the store: a line for each build that was ever finished here."""
VALUE = "value.json"
"""File of a build's folder: its value."""
REWRITTEN = "rewritten.json"
"""File of a build's folder, signed: what an erasure has made of its files, by their digests."""
NEWEST_REPORT = "newest"
"""File that holds the name of the newest report's folder."""
SMALL_BYTES = 1_000_000
"""A larger file of the state is never written anew under its name."""
DEFAULT_CACHE_GB = 50
CACHE_KEPT_S = 3600
"""A copy is kept for so long after its last use: somebody may be about to open it."""
NOWHERE = f"neither {{}} nor a folder above it holds {USE_CASE_FILE}; {NAME_ONE}"
USE_CASES = "use_cases"
USE_CASE_NAME = r"^[a-z][a-z0-9-]*$"
Value = TypeVar("Value", bound=BaseModel)


@dataclass(frozen=True)
class Settings:
    """Folders and addresses of one installation."""

    home: Path
    feature_repo: Path
    profile: str = DEFAULT_PROFILE
    database_url: str | None = field(default=None, repr=False)  # may hold a password
    leases_folder: Path | None = None
    location: Location | None = None
    """Where what machines share is kept; None: in the state folder itself."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read the project from `FALAJ_FEATURE_REPO`, else find it from the working directory.

        `FALAJ_HOME` is the state folder; without it, it is `.falaj` beside `use_case.yaml`. The
        projects that a checkout of Falaj has in `feature_repo` share the one at its top.
        `FALAJ_PROFILE` (default `local`) names the stores that the feature repository describes.
        `FALAJ_STATE` names the location of the state where it is not the state folder, which is
        then this machine's copy of what it works with. `FALAJ_TENANT` names a tenant of the
        installation at that state folder, to work in its own. `FALAJ_DATABASE_URL` is the database
        where several hosts share one, `FALAJ_LEASES` the folder of the leases of devices where
        several platforms share a host.

        Raises:
            ConfigurationError: no state folder is named and there is no project, or there is no
                such tenant. Where a folder is named, the working directory stands for the project:
                reading it tells that it is none, and commands that need the state alone work
                anywhere.
        """
        names = "FALAJ_HOME", "FALAJ_FEATURE_REPO"
        home, named = (_named_folder(environment, name) for name in names)
        repo = named or find_project(Path.cwd()) or Path.cwd()
        if home is None:
            if not (repo / USE_CASE_FILE).is_file():
                seen = no_project(repo) if named else NOWHERE.format(repo)
                raise ConfigurationError(f"{seen}. Nothing was changed")
            home = (_folder_of_state(repo) / ".falaj").resolve()
        if (tenant := environment.get(TENANT)) and tenant != tenant_of(home):
            home = tenant_home(home, tenant)
        own_tenant(home)  # refuses one that is not listed
        return cls(
            home=home,
            feature_repo=repo,
            profile=environment.get("FALAJ_PROFILE") or DEFAULT_PROFILE,
            database_url=environment.get("FALAJ_DATABASE_URL") or None,
            leases_folder=_named_folder(environment, "FALAJ_LEASES"),
            location=state_location(home, environment),
        )

    @property
    def use_case(self) -> str:
        """Name of the use case that the feature repository describes.

        Raises:
            ConfigurationError: the repository does not say.
        """
        file = self.feature_repo / USE_CASE_FILE
        absent = f"{no_project(self.feature_repo)}. Nothing was read"
        described = files.read_yaml(file, str(file), absent)
        name = described.get("name")
        if not isinstance(name, str) or not re.fullmatch(USE_CASE_NAME, name):
            raise ConfigurationError(
                f"{file} names the use case {name!r}; expected `name:` with small letters, digits "
                "and dashes, for it names a folder too. Nothing was touched"
            )
        return name

    @property
    def features_home(self) -> Path:
        """Folder of the state that is the use case's alone.

        Feature registry, online store, published tables, monitoring, reports. The default use case
        has the state folder itself, any other one `use_cases/<name>` in it, wherever its repository
        lies.
        """
        return features_home_of(self.home, self.use_case)

    @property
    def store(self) -> ArtifactStore:
        """The artifact store of this installation."""
        return ArtifactStore(self.home / ARTIFACTS, self.location)

    @property
    def mlflow_uri(self) -> str:
        """Tracking and registry address: a schema of the database, else an SQLite file."""
        if self.database_url is None:
            return f"sqlite:///{self.home / 'mlflow' / 'mlflow.db'}"
        mark = "&" if "?" in self.database_url else "?"
        return f"{_by_psycopg(self.database_url)}{mark}options=-csearch_path%3D{MLFLOW_SCHEMA}"

    @property
    def mlflow_artifacts(self) -> Path:
        """Folder in which MLflow keeps the files of its runs."""
        return self.home / "mlflow" / "artifacts"

    @property
    def metadata_url(self) -> str:
        """SQLAlchemy address of the database of operation: decisions, releases."""
        return self.database_url or f"sqlite:///{self.metadata_file}"

    @property
    def leases_path(self) -> Path:
        """Folder of the leases of this host's devices."""
        return self.leases_folder or installation_of(self.home) / "leases"

    @property
    def metadata_file(self) -> Path:
        """SQLite file of the database of operation, where no other one is named."""
        return self.home / "operation" / "operation.db"

    @property
    def reports(self) -> Path:
        """Folder of the use case's run reports."""
        return self.features_home / "reports"

    def latest_report(self) -> Path:
        """Folder of the newest report, on whatever machine it was written; need not exist."""
        if self.location is None:
            return self.reports / "latest"
        with suppress(FileNotFoundError):
            name = bring(self.reports / NEWEST_REPORT).read_text(encoding="utf-8").strip()
            return bring(self.reports / name)
        return self.reports / "latest"


def features_home_of(home: Path, use_case: str) -> Path:
    """See `Settings.features_home`."""
    return home if use_case == DEFAULT_FEATURE_REPO.name else home / USE_CASES / use_case


def state_of(features_home: Path) -> Path:
    """The state folder that `Settings.features_home` is of."""
    inside = features_home.parent.name == USE_CASES
    return features_home.parents[1] if inside else features_home


def find_project(start: Path) -> Path | None:
    """The project that a folder lies in: the first folder upward that holds `use_case.yaml`.

    A checkout of Falaj counts as its default project, `feature_repo/flights`.
    """
    for folder in (start, *start.parents):
        if (folder / USE_CASE_FILE).is_file():
            return folder
        if _is_checkout(folder):
            return folder / DEFAULT_FEATURE_REPO
    return None


def no_project(folder: Path) -> str:
    """What to say of a folder that should be a project and is none; a sentence without its end."""
    return f"{folder / USE_CASE_FILE} does not exist; {NAME_ONE}"


def _folder_of_state(project: Path) -> Path:
    top = project.parent.parent
    shipped = project.parent == top / DEFAULT_FEATURE_REPO.parent and _is_checkout(top)
    return top if shipped else project


def _is_checkout(folder: Path) -> bool:
    """Whether it is a checkout of Falaj itself, by the name in its pyproject.toml."""
    if not (folder / DEFAULT_FEATURE_REPO / USE_CASE_FILE).is_file():
        return False
    try:
        tables = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    project = tables.get("project")
    return isinstance(project, dict) and project.get("name") == "falaj"


def _named_folder(environment: Mapping[str, str], variable: str) -> Path | None:
    named = environment.get(variable)
    return Path(named).expanduser().resolve() if named else None


def state_location(home: Path, environment: Mapping[str, str] = os.environ) -> Location | None:
    """The location of `FALAJ_STATE`; None where that is not set, or is the state folder itself.

    Raises:
        ConfigurationError: it is no location.
    """
    url = environment.get("FALAJ_STATE")
    location = Location.of(url) if url else None
    return None if location is None or location.folder == home else location


def server_environment(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for which a server's file stands; none where there is no such file.

    `${NAME}` in a value is a variable of the environment, so that the file holds no secret. Where
    Redis is named and Feast's registry is not, that is in the database.

    Raises:
        ConfigurationError: it names what it may not, or a variable that is not set.
    """
    try:
        named = files.read_yaml(file, str(file))
    except FileNotFoundError:
        return {}
    if unknown := sorted({*named} - {*SERVER_NAMES}):
        raise ConfigurationError(
            f"{file} names {', '.join(map(str, unknown))}; expected {', '.join(SERVER_NAMES)}. "
            "Nothing was changed"
        )

    def value_of(found: re.Match[str]) -> str:
        if not environment.get(found[1]):
            raise ConfigurationError(
                f"{file} needs the variable {found[1]}, which is not set. Nothing was changed"
            )
        return environment[found[1]]

    values = {
        SERVER_NAMES[name]: re.sub(r"\$\{(\w+)\}", value_of, str(value))
        for name, value in named.items()
        if not environment.get(SERVER_NAMES[name])
    }
    if "redis" in named:
        values["FALAJ_PROFILE"] = environment.get("FALAJ_PROFILE") or "server"
        if "registry" not in named and (url := values.get("FALAJ_DATABASE_URL")):
            values["FALAJ_REGISTRY_URL"] = environment.get("FALAJ_REGISTRY_URL") or _by_psycopg(url)
    return values


def _by_psycopg(url: str) -> str:
    """The address of a PostgreSQL database, with the driver that is installed."""
    return re.sub(r"^postgres(ql)?(\+psycopg)?://", "postgresql+psycopg://", url)


def bring(path: Path, *, exact: bool = False) -> Path:
    """Bring a file of the state folder, or all files of a folder of it, up to what machines share.

    A file is read anew, unless it holds so much that its name says what is in it. Nothing happens
    where the state is in this folder alone.

    Args:
        path: in the state folder.
        exact: a name has one content for ever, and files of the folder that the location does not
            have are removed here, if not hidden.

    Raises:
        TransientError, StorageError: the location does not answer, or refuses.
    """
    location, name = _place(path)
    if location is None:
        return path
    listed = location.entries(name)
    if not listed and (content := location.read(name)) is not None:
        _put(path, content)
    for each, seen in listed.items():
        target = path / each.removeprefix(f"{name}/")
        if seen.num_bytes < SMALL_BYTES and not (exact and target.exists()):
            if (content := location.read(each)) is not None:
                _put(target, content)
        elif not target.is_file() or target.stat().st_size != seen.num_bytes:
            location.bring(each, target)
    if exact:
        for file in path.glob("[!.]*"):
            if file.is_file() and f"{name}/{file.name}" not in listed:
                file.unlink(missing_ok=True)
    return path


def children(folder: Path) -> list[Path]:
    """What is in a folder of the state, on whatever machine it was written; hidden names are not.

    Raises:
        TransientError, StorageError: the location does not answer, or refuses.
    """
    location, name = _place(folder)
    names = {path.name for path in folder.glob("[!.]*")}
    if location is not None:
        names |= {e.removeprefix(f"{name}/").split("/")[0] for e in location.entries(name)}
    return [folder / each for each in sorted(names) if not each.startswith(".")]


def claim(path: Path, content: str, *, private: bool = False) -> bytes:
    """Write a small file that nobody has written, of all machines; what is in it then.

    Args:
        private: its owner alone may read it.

    Raises:
        TransientError, StorageError: as `put`.
    """
    location, name = _place(path)
    there = content.encode()
    if location is not None and not location.create(name, there):
        there = location.read(name) or there
    if location is None or not path.exists():
        aside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        files.write_atomically(aside, there, private=private)
        with suppress(FileExistsError):  # another process was first
            os.link(aside, path)
        aside.unlink()
    return path.read_bytes()


def put(path: Path, content: str | bytes) -> None:
    """Write a small file of the state folder for all machines; it appears whole.

    Raises:
        TransientError, StorageError: the location does not answer, or refuses, or the disk does.
    """
    location, name = _place(path)
    new = content.encode() if isinstance(content, str) else content
    if location is not None:
        location.write(name, new)
    files.write_atomically(path, new)


def append(path: Path, lines: Sequence[str], *, mode: int = 0o666) -> None:
    """Append lines to a journal of the state folder, whoever else does at the same time.

    Raises:
        TransientError, StorageError: as `put`; the journal is as it was.
    """
    location, name = _place(path)
    if location is None:
        files.append_lines(path, lines, mode=mode)
        return
    added = "".join(f"{line}\n" for line in lines).encode()
    _put(path, location.change(name, lambda old: (old or b"") + added))


def _put(path: Path, content: bytes) -> None:
    if not path.is_file() or path.read_bytes() != content:
        files.write_atomically(path, content, durable=False)


def send(path: Path, final: Path | None = None) -> None:
    """Let other machines see a file of the state folder, or all files of a folder of it.

    Those of a folder are sent in the order of their names, whole one by one; hidden ones and locks
    are not. Nothing happens where the state is in this folder alone.

    Args:
        path: in the state folder.
        final: the name under which others see the file.

    Raises:
        TransientError, StorageError: the location does not answer, or refuses.
    """
    location, name = _place(final or path)
    if location is None:
        return
    if path.is_file():
        location.write(name, path)
        return
    there = location.entries(name)
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        inside = file.relative_to(path)
        is_lock = file.name.endswith("lock") and not file.stat().st_size  # as ours are
        hidden = is_lock or any(part.startswith(".") for part in inside.parts)
        seen = there.get(f"{name}/{inside.as_posix()}")
        if not hidden and not (seen and _is_same(file, seen)):
            location.write(f"{name}/{inside.as_posix()}", file)


def _is_same(file: Path, seen: Entry) -> bool:
    if file.stat().st_size != seen.num_bytes:
        return False
    if seen.num_bytes >= SMALL_BYTES:
        return True
    return hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest() == seen.tag


def drop(path: Path) -> None:
    """Remove a file of the state folder, or a folder of it with all files, here and there."""
    location, name = _place(path)
    if location is not None:
        location.remove([name, *location.entries(name)])
    files.remove(path)


def is_shared(path: Path) -> bool:
    """Whether machines share this path, since it is of a state folder with a location."""
    return _place(path)[0] is not None


def _place(path: Path) -> tuple[Location | None, str]:
    """The location, where there is one and the path is of the state folder, and its name there."""
    home = _named_folder(os.environ, "FALAJ_HOME")
    if home is None or not os.environ.get("FALAJ_STATE") or not path.is_relative_to(home):
        return None, ""
    return state_location(home), "" if path == home else path.relative_to(home).as_posix()


class Build(BaseModel):
    """What a location says of a finished build: the value, and the content of all its files."""

    value: dict[str, Any]
    files: dict[str, tuple[str, int]]
    """SHA-256 and bytes by the name in the build's folder."""
    finished: datetime

    @field_validator("files")
    @classmethod
    def _stay_inside(cls, given: dict[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
        if outside := [name for name in given if not files.is_inside(name)]:
            raise ValueError(f"{outside[0]!r} is no file of a build's folder")
        return given

    def below(self, name: str) -> dict[str, tuple[str, int]]:
        """The file of this name, or those in the folder of this name."""
        inside = f"{name}/"
        return {n: seen for n, seen in self.files.items() if n == name or n.startswith(inside)}

    def digest(self, name: str) -> str:
        """As `files.digest_of` of the file or folder; of nothing where it is not there."""
        found = {Path(n): seen for n, seen in self.below(name).items()}
        if Path(name) in found:
            return found[Path(name)][0]
        listed = ((n.relative_to(name).as_posix(), found[n][0]) for n in sorted(found))
        return files.digest_of_all(listed)


@dataclass(frozen=True)
class ArtifactStore:
    """Content-addressed folders, written aside and renamed into place: whole or absent.

    A folder is `<root>/<kind>/<key>/`; the key is a digest of everything that decides its content,
    so what exists under a key never changes and a finished build is never repeated.

    With a location, `root` holds copies of what this machine has used. The location keeps the
    content of files by digest, and `artifacts/<kind>/<key>.json` names them: it is written last, by
    whoever is first, so a build is there for all machines at once, or not at all.
    """

    root: Path
    location: Location | None = None

    def build_once(
        self, kind: str, key: str, value_type: type[Value], build: Callable[[StagedFolder], Value]
    ) -> Value:
        """Return the value built earlier under this key, or build it now.

        Args:
            kind: sort of thing, such as `snapshots`.
            key: digest from `content_key`.
            value_type: contract that `build` returns.
            build: writes files into the staged folder and returns the value that names them.

        Raises:
            StorageError: the disk is full, or refused a write; the staged folder was removed.
            TransientError: the location does not answer.
        """
        final = self.root / kind / key
        if (finished := self.find(kind, key, value_type)) is not None:
            return finished
        started = time.monotonic()
        files.require_space(self.root)
        with (
            refused_writes_explained(final),
            files.scratch_folder(STAGING, files.make_folder(final.parent)) as folder,
        ):
            value = build(StagedFolder(self, kind, key, folder))
            (folder / VALUE).write_text(value.model_dump_json(indent=1, by_alias=True))
            if self.location is None:
                is_first = self._publish(folder, final)
            elif is_first := self._send(self.location, kind, key, folder):
                self._publish(folder, final)
            if is_first:
                self._note_build(kind, key, time.monotonic() - started)
        if is_first:
            return value
        # Another process was first; of the two, all use its files.
        return self.build_once(kind, key, value_type, build)

    def find(self, kind: str, key: str, value_type: type[Value]) -> Value | None:
        """The value built earlier under this key, if it and all it holds are whole.

        Nothing but the value is brought here; files are when their path is asked for.
        """
        folder = self.root / kind / key
        record = self._record(kind, key)
        shared, seen = self._shared(kind, key, record), files.file_state(folder / VALUE)
        try:
            if shared is not None:
                value = value_type.model_validate(shared.value)
            else:
                value = value_type.model_validate_json((folder / VALUE).read_text())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            value = None
        here = folder.resolve()
        inside = [a for a in named_artifacts(value) if self._locate(a.uri).is_relative_to(here)]
        if value is None or not all(self._is_whole(a, shared) for a in inside):
            # Another may have built it since.
            if self.location and record is not None and record == self._record(kind, key):
                self.location.remove([_build_name(kind, key)])
            if folder.exists() and files.file_state(folder / VALUE) == seen:
                _remove(folder)
            return None
        if self.location is not None and shared is None:  # built before there was a location
            self._send(self.location, kind, key, folder)
        return value

    def folders(self, kind: str) -> list[Path]:
        """The folders of all finished builds of a kind, each with its `value.json`, by key."""
        if self.location is not None:
            for key in (Path(name).stem for name in self.location.entries(f"{ARTIFACTS}/{kind}")):
                if not (self.root / kind / key / VALUE).exists():
                    self._shared(kind, key, self._record(kind, key))
        return sorted(file.parent for file in (self.root / kind).glob(f"[!.]*/{VALUE}"))

    def _record(self, kind: str, key: str) -> bytes | None:
        return self.location.read(_build_name(kind, key)) if self.location else None

    def _shared(self, kind: str, key: str, content: bytes | None) -> Build | None:
        """What the location's record says of a build, noted here; None where it says nothing."""
        if content is None:
            return None
        try:
            shared = Build.model_validate_json(content)
        except ValidationError:  # written by hand, or by another release
            return None
        folder = self.root / kind / key
        if not (folder / VALUE).exists():
            files.write_atomically(folder / SHARED, content, durable=False)
            text = json.dumps(shared.value, indent=1)
            files.write_atomically(folder / VALUE, text, durable=False)
        return shared

    def _is_whole(self, artifact: Artifact, shared: Build | None) -> bool:
        if shared is None or self.location is None:
            return self.holds(artifact)
        path, name = self._locate(artifact.uri), artifact.uri.split("/", 2)[2]
        if path.exists() and self._answers(artifact, files.digest_of(path)):
            return True
        held = shared.below(name).values()
        sizes = ((self.location.size(object_name(sha)), size) for sha, size in held)
        is_named = self._answers(artifact, shared.digest(name))
        return is_named and all(s == size for s, size in sizes)

    def _answers(self, artifact: Artifact, seen: str) -> bool:
        """Whether content is what the digest says, or what an erasure has made of that."""
        if seen == artifact.sha256:
            return True
        kind, key, _ = artifact.uri.removeprefix(URI_SCHEME).split("/", 2)
        self._bring(f"{URI_SCHEME}{kind}/{key}/{REWRITTEN}", anew=True)
        note = self.root / kind / key / REWRITTEN
        if not note.exists():
            return False
        home = self.root.parent
        keys = named_keys(home) or FileKeys(home / "keyring", bring)
        trusted = keys.public_keys(EVIDENCE)
        digests = read_signed(trusted, note.read_text(encoding="utf-8"), str(note))
        return bool(digests.get(artifact.sha256) == seen)

    def _send(self, location: Location, kind: str, key: str, folder: Path) -> bool:
        """Bring a build into the location; False where another machine was first."""
        inside = (path for path in sorted(folder.rglob("*")) if path.is_file())
        content = {
            path.relative_to(folder).as_posix(): location.send_content(path)
            for path in inside
            if path.name not in (VALUE, SHARED) or path.parent != folder
            if path.parent.name != PARTIAL
        }
        value = json.loads((folder / VALUE).read_text())
        build = Build(value=value, files=content, finished=datetime.now(UTC))
        return location.create(_build_name(kind, key), build.model_dump_json().encode())

    def file(self, folder: Path, name: str) -> Path:
        """A file of one of `folders`, which is brought here; it may be absent all the same."""
        path = folder / name
        self._bring(f"{URI_SCHEME}{path.relative_to(self.root).as_posix()}")
        return path

    def _bring(self, uri: str, *, anew: bool = False) -> None:
        """Copy what a file or folder lacks here from the location, where there is one."""
        kind, key, name = uri.removeprefix(URI_SCHEME).split("/", 2)
        folder = self.root / kind / key
        was_built_here = not (folder / SHARED).exists() and (folder / VALUE).exists()
        if self.location is None or (was_built_here and not anew):
            return
        if (shared := self._shared(kind, key, self._record(kind, key))) is None:
            return
        wanted = shared.below(name).items()
        lacking = [(n, sha) for n, (sha, _) in wanted if anew or not (folder / n).exists()]
        with suppress(FileNotFoundError):
            os.utime(folder / SHARED)
        if lacking:
            with suppress(FileNotFoundError):  # another process makes room too
                self._make_room()
        with suppress(FileNotFoundError):
            for file, sha256 in lacking:
                path, target = folder / PARTIAL / file, folder / file
                if path.exists() and not anew:
                    self._complete(path, sha256, shared, target)
                if anew or not target.exists():
                    self.location.bring(object_name(sha256), target, sha256=sha256)

    def _complete(self, path: Path, sha256: str, shared: Build, target: Path) -> None:
        """Bring the rest of a partial copy; where it is no part of this content, nothing."""
        digest, _ = shared.files.get(PARTS_FILE, (None, 0))
        if self.location is not None and digest:
            url = self.location.url
            remote = RemoteFile(path=path, url=url, sha256=sha256, parts_sha256=digest)
            with suppress(ArtifactError):  # then the whole says what is wrong
                PartialCopy(remote, self.location).complete(target)

    def _make_room(self) -> None:
        """Remove the copies that were not used for the longest time, down to the bound."""
        named = os.environ.get("FALAJ_CACHE_GB") or DEFAULT_CACHE_GB
        try:
            limit = float(named) * 1e9
        except ValueError as exc:
            raise ConfigurationError(
                f"FALAJ_CACHE_GB is {named!r}; expected a number of gigabytes. Nothing was brought"
            ) from exc
        copies = [file.parent for file in self.root.glob(f"*/[!.]*/{SHARED}")]
        sizes = {folder: files.disk_use(folder) for folder in copies}
        used = {folder: (folder / SHARED).stat().st_mtime for folder in copies}
        total = sum(sizes.values())
        for folder in sorted(copies, key=used.__getitem__):
            if total <= limit or time.time() - used[folder] < CACHE_KEPT_S:
                return
            _remove(folder)
            total -= sizes[folder]

    @property
    def num_builds(self) -> int:
        """How many builds this store has ever finished, by whomever."""
        return len(self._journal_lines())

    def built_since(self, num_builds: int) -> Callable[[Artifact], bool]:
        """Tells of an artifact whether it was built after the first `num_builds` of all builds."""
        folders = set()
        for line in self._journal_lines()[num_builds:]:
            try:
                build = json.loads(line)
                folders.add((build["kind"], build["key"]))
            except (ValueError, KeyError):  # cut off by a full disk
                continue
        return lambda made: tuple(made.uri.removeprefix(URI_SCHEME).split("/")[:2]) in folders

    def _journal_lines(self) -> list[str]:
        try:
            return (self.root / BUILD_LOG).read_text().splitlines()
        except FileNotFoundError:
            return []

    def path(self, artifact: Artifact, *, verify: bool = True) -> Path:
        """Local path of an artifact, its content checked against its digest.

        Raises:
            ArtifactError: it is absent, or its content is not what the digest says.
        """
        path = self._locate(artifact.uri)
        if self.location is not None:
            self._bring(artifact.uri)
            if not path.exists() or (verify and not self._answers(artifact, files.digest_of(path))):
                self._bring(artifact.uri, anew=True)
        if not path.exists():
            raise ArtifactError(
                f"{artifact.uri} is named by a result but absent from "
                f"{self.location.url if self.location else self.root}; run the stage that makes it "
                "again"
            )
        if verify and not self._answers(artifact, seen := files.digest_of(path)):
            raise ArtifactError(
                f"{artifact.uri} has SHA-256 {seen[:12]}, expected {artifact.sha256[:12]}: it "
                f"was changed or damaged. Remove {path.parent} and run again to rebuild it"
            )
        return path

    def remote(self, artifact: Artifact, parts: Artifact | None) -> RemoteFile | None:
        """What a `PartialCopy` is made of; None: use the whole.

        Args:
            artifact: the file; where it is here, it is used.
            parts: names its parts; None in older values.
        """
        path = self._locate(artifact.uri)
        if self.location is None or parts is None or path.exists():
            return None
        self.path(parts)
        path, url = path.parent / PARTIAL / path.name, self.location.url
        sha256, parts_sha256 = artifact.sha256, parts.sha256
        return RemoteFile(path=path, url=url, sha256=sha256, parts_sha256=parts_sha256)

    def holds(self, artifact: Artifact) -> bool:
        """True where the artifact is present and whole."""
        try:
            self.path(artifact)
        except ArtifactError:
            return False
        return True

    def _note_build(self, kind: str, key: str, seconds: float) -> None:
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        line = {"kind": kind, "key": key, "seconds": round(seconds, 3), "finished": finished}
        # One short write: whole, also from two processes.
        with (self.root / BUILD_LOG).open("a") as journal:
            journal.write(json.dumps(line) + "\n")

    def _locate(self, uri: str) -> Path:
        relative = uri.removeprefix(URI_SCHEME)
        path = (self.root / relative).resolve()
        inside = path.is_relative_to(self.root.resolve()) and relative.count("/") > 1
        if not uri.startswith(URI_SCHEME) or not inside:
            raise ArtifactError(
                f"{uri!r} is no artifact of this store; expected {URI_SCHEME}<kind>/<key>/<path>"
            )
        return path

    @staticmethod
    def _publish(folder: Path, final: Path) -> bool:
        """Show a build; False where another process was first."""
        for path in folder.rglob("*"):
            if path.is_file():
                files.flush_to_disk(path)
        try:
            folder.rename(final)
        except OSError:
            if not (final / VALUE).exists():
                raise
            return False
        files.flush_to_disk(final.parent)
        return True


@dataclass(frozen=True)
class StagedFolder:
    """A folder being written; its files get the URIs that they will have once published."""

    store: ArtifactStore
    kind: str
    key: str
    path: Path

    def artifact(self, name: str) -> Artifact:
        """Name the file or folder `name` inside the staged folder, with its digest."""
        path = self.path / name
        return Artifact(
            uri=f"{URI_SCHEME}{self.kind}/{self.key}/{name}",
            sha256=files.digest_of(path),
            num_bytes=files.size_of(path),
        )

    def parts(self, name: str) -> Artifact:
        """Describe the parts of the Parquet file `name`, so that they can be brought alone."""
        (self.path / PARTS_FILE).write_text(described(self.path / name))
        return self.artifact(PARTS_FILE)


def _remove(folder: Path) -> None:
    """All of a build at once; what a killed process leaves of it goes with the next build."""
    mine = f"{STAGING}-{ProcessName.of_this().token}-{secrets.token_hex(4)}"
    # Where it is not there, another process was first.
    with refused_writes_explained(folder), suppress(FileNotFoundError):
        aside = folder.rename(folder.with_name(mine))
        shutil.rmtree(aside, ignore_errors=True)


def _build_name(kind: str, key: str) -> str:
    return f"{ARTIFACTS}/{kind}/{key}.json"


def named_artifacts(value: object) -> Iterator[Artifact]:
    """All artifacts that a value names, at any depth."""
    if isinstance(value, Artifact):
        yield value
    else:
        for _, item in items_of(value):
            yield from named_artifacts(item)


def content_key(*parts: object) -> str:
    """SHA-256 over the canonical JSON of `parts`: pydantic values, paths to code, plain data."""
    plain = json.dumps([_plain(part) for part in parts], sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()[:32]


def _plain(part: object) -> object:
    if isinstance(part, BaseModel):
        return part.model_dump(mode="json")
    if isinstance(part, Path):
        return files.digest_of(part)
    if isinstance(part, tuple | list):
        return [_plain(item) for item in part]
    return part


def code_digest(module_file: str, *also: str, without: Collection[str] = ()) -> str:
    """Digest of the statements that decide what the module `module_file` (`__file__`) makes.

    Part of every content key, so that a stage runs again when its code changes, or the code of its
    room and of the contracts that it imports; see `tasks.kernel.code_digest`.

    Args:
        module_file: the module that does the work.
        also: dotted names of modules that it reaches otherwise than by import.
        without: dotted names of modules and packages that change no result.
    """
    return statements_digest(Path(module_file), PROJECT_ROOT, also, without)


def tool_python(name: str) -> Path | None:
    """Interpreter of an environment that one tool has to itself; None where there is none.

    A tool whose packages cannot be beside the project's runs there, as a process of its own.

    Args:
        name: such as `triton`. `FALAJ_TRITON_PYTHON` names the interpreter; else it is that of
            `.venv-triton` beside the code, where `make` puts it.
    """
    variable = f"FALAJ_{name.upper().replace('-', '_')}_PYTHON"
    python = Path(os.environ.get(variable) or PROJECT_ROOT / f".venv-{name}" / "bin" / "python")
    return python if python.is_file() else None


def platform_address(home: Path, name: str) -> str | None:
    """An address of the platform that runs, or ran last, on a state folder; None where none did.

    Args:
        home: the state folder.
        name: such as `mlflow_url`; see `infra.platform.files.Endpoint`.
    """
    try:
        told = json.loads((home / "platform" / "endpoint.json").read_text(encoding="utf-8"))[name]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return str(told).rstrip("/") or None
