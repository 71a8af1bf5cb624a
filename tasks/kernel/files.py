"""Files: written whole or not at all, appended line by line, locked, flushed, on a full disk.

YAML files in which nothing is lost in silence. Folders that a process works in for a while, and
what killed processes left of theirs.
"""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tasks.kernel.errors import (
    ConfigurationError,
    StorageError,
    TransientError,
    refused_writes_explained,
)
from tasks.kernel.process import TOKEN, ProcessName, variables_set

PRIVATE_MODE = 0o700
LOCK_POLL_S = 0.02
LEAST_FREE_BYTES = 32_000_000
"""Prefect's database alone begins with some megabytes, and fails in many ways without them."""


def digest_of(path: Path) -> str:
    """SHA-256 of a file; of a folder, over its files' relative names and digests."""
    if path.is_dir():
        inside = (child for child in sorted(path.rglob("*")) if child.is_file())
        return digest_of_all((c.relative_to(path).as_posix(), digest_of(c)) for c in inside)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_all(named: Iterable[tuple[str, str]]) -> str:
    """SHA-256 over names and their digests, in this order and as `sha256sum` lists them."""
    listing = "".join(f"{digest}  {name}\n" for name, digest in named)
    return hashlib.sha256(listing.encode()).hexdigest()


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    if path.is_dir():
        return sum(child.stat().st_size for child in path.rglob("*") if child.is_file())
    return path.stat().st_size


def disk_use(folder: Path) -> int:
    """Bytes that the files of a folder take of the disk: holes take none, two names of one once."""
    found = (child.stat() for child in folder.rglob("*") if child.is_file())
    return 512 * sum({seen.st_ino: seen.st_blocks for seen in found}.values())


def is_inside(name: str, link: str = "") -> bool:
    """Whether a name that a store hands us, and where a link there leads, stay below a folder."""
    ahead = os.path.normpath(name)
    led = os.path.normpath(os.path.join(os.path.dirname(name), link or "."))
    return ahead != "." and not any(place.startswith(("/", "..")) for place in (ahead, led))


def file_state(path: Path) -> tuple[int, int, int] | None:
    """A value that changes with a file: moment of its change, number and size; None without it."""
    try:
        seen = path.stat()
    except OSError:  # reading it says why
        return None
    return seen.st_mtime_ns, seen.st_ino, seen.st_size


def flush_to_disk(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, *, durable: bool = True, private: bool = False) -> Iterator[Path]:
    """A path to write to; when the block ends its file takes the place of `path`, else it is gone.

    Args:
        path: its folder is made.
        durable: survive a power cut; not needed for what matters only while a process runs.
        private: others than its owner can read the file at no moment.

    Raises:
        StorageError: the disk refused a write; what was at `path` is as it was.
    """
    with refused_writes_explained(path):
        make_folder(path.parent)
        aside = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            if private:
                aside.touch(0o600)
            yield aside
            if durable:
                flush_to_disk(aside)
            aside.replace(path)
            if durable:
                flush_to_disk(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_atomically(
    path: Path, content: str | bytes, *, durable: bool = True, private: bool = False
) -> None:
    """Write a small file aside and rename it into place; see `replacing`."""
    with replacing(path, durable=durable, private=private) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def append_lines(path: Path, lines: Sequence[str], *, mode: int = 0o666) -> None:
    """Append lines to a journal, all or none of them, and flush them to disk.

    A line that a killed process or a power cut left unfinished is ended first. One writer at a
    time: several take a lock.

    Raises:
        StorageError: the disk refused; the file is as it was.
    """
    with refused_writes_explained(path):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, mode)
        try:
            size = os.fstat(descriptor).st_size
            is_torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
            text = "\n" * bool(is_torn) + "".join(f"{line}\n" for line in lines)
            left = memoryview(text.encode())
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)


@contextmanager
def locked(
    path: Path,
    *,
    shared: bool = False,
    wait_s: float = float("inf"),
    held: Callable[[], Exception] | None = None,
) -> Iterator[int]:
    """Hold the lock of a file against other processes and threads; the file is made.

    The kernel frees it when this process ends, however it ends. A child that inherits the
    descriptor which is yielded holds it too.

    Args:
        path: its folder is made; the file may be anything that is never renamed or removed.
        shared: others may hold it too, if they share it.
        wait_s: how long to wait for others; 0: not at all.
        held: the error where others hold it for longer; default: a TransientError.

    Raises:
        StorageError: the file cannot be made.
    """
    with refused_writes_explained(path):
        make_folder(path.parent)
        descriptor = os.open(path, (os.O_RDONLY if shared else os.O_RDWR) | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while not _take(descriptor, shared=shared, wait=wait_s == float("inf")):
            if time.monotonic() >= deadline:
                if held:
                    raise held()
                raise TransientError(f"others held {path} for {wait_s:g} s; try again")
            time.sleep(LOCK_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _take(descriptor: int, *, shared: bool, wait: bool) -> bool:
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(path: Path) -> bool:
    """True while a process holds the lock of a file; makes nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _take(descriptor, shared=True, wait=False)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> Path:
    """Make a folder and those above it; only their owner may enter the new ones.

    `Path.mkdir` with `parents` gives the mode to the last one alone. Those that exist stay as they
    are.
    """
    for missing in [each for each in reversed((folder, *folder.parents)) if not each.is_dir()]:
        missing.mkdir(exist_ok=True, mode=PRIVATE_MODE)
    return folder


def private_folder(folder: Path) -> Path:
    """Make a folder that only its owner may enter; one that others may enter is closed to them.

    Raises:
        StorageError: it cannot be made, or belongs to somebody else and is open to others.
    """
    with refused_writes_explained(folder):
        make_folder(folder)
        if folder.stat().st_mode & 0o077:
            folder.chmod(PRIVATE_MODE)
    return folder


def machine_id(home: Path, network: Path = Path("/sys/class/net")) -> str:
    """Tells machines of one host name apart: `<of the state folder's file system>.<of its cards>`.

    A file's inode and moment, since images of containers and cloned machines share
    `/etc/machine-id`, and the addresses of network cards, since a clone has the file as well.

    Args:
        home: state folder; a file is made in it where there is none.
        network: of sysfs.
    """
    file = private_folder(home / "platform") / "machine"
    with suppress(FileExistsError):
        file.open("x").close()
    seen = file.stat()
    cards = sorted(card.with_name("address").read_text() for card in network.glob("*/device"))
    parts = (f"{seen.st_ino} {seen.st_mtime_ns}", " ".join(cards))
    return ".".join(hashlib.sha256(part.encode()).hexdigest()[:12] for part in parts)


def lack_of_space(folder: Path) -> str:
    """A sentence about a disk that is full, or nearly; nothing where it is not.

    Args:
        folder: need not exist.
    """
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    if free >= LEAST_FREE_BYTES:
        return ""
    return (
        f"{folder}: {free / 1e6:.1f} MB are free on its disk, expected at least "
        f"{LEAST_FREE_BYTES / 1e6:.0f} MB. Free some space, or set FALAJ_HOME to a folder on "
        "another disk, and run again"
    )


def require_space(folder: Path) -> None:
    """Refuse to begin what cannot be written to its end.

    Raises:
        StorageError: there is too little space.
    """
    if trouble := lack_of_space(folder):
        raise StorageError(f"{trouble}; nothing was begun")


def shows_damage(exc: sqlite3.Error) -> bool:
    """True where SQLite read the file and it is no whole database.

    A full disk, a lock or a missing permission says nothing about what is in the file.
    """
    primary_code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    return primary_code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


# The loader of libyaml reads the same language ten times faster, where it was built in.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(file: Path, name: str, absent: str = "") -> dict[str, Any]:
    """The names and values that a file holds.

    Args:
        file: to be read.
        name: what sentences call it.
        absent: what a person is told where there is no such file.

    Raises:
        FileNotFoundError: there is no such file, and nothing is to be told of that.
        ConfigurationError: there is none; or it cannot be read, is no YAML or no UTF-8, writes a
            name twice in one mapping, or holds something other than names with values.
    """
    try:
        loader = _Loader(file.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        twice = _written_twice(root)  # before `<<` is resolved in the nodes themselves
        content = loader.construct_document(root) if root else None
    except FileNotFoundError as exc:
        if not absent:
            raise
        raise ConfigurationError(absent) from exc
    except OSError as exc:
        raise ConfigurationError(f"{name} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigurationError(f"{name} is no YAML: {exc}; save it as UTF-8") from exc
    except yaml.YAMLError as exc:
        raise ConfigurationError(f"{name} is no YAML: {' '.join(str(exc).split())}") from exc
    if twice:
        line = twice.start_mark.line + 1
        raise ConfigurationError(f"{name}, line {line}: {twice.value} is written twice there")
    if not isinstance(content, dict):
        held = "nothing" if content is None else f"a {type(content).__name__}"
        raise ConfigurationError(f"{name} holds {held}; expected names with values, `name: value`")
    return content


def _written_twice(root: yaml.Node | None) -> yaml.ScalarNode | None:
    """A name that one mapping writes twice, before `<<` brings in what it may replace."""
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
            continue
        seen.add(id(node))  # an alias is its anchor's node once more
        if isinstance(node, yaml.MappingNode):
            names = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in names:
                    return key
                names.add((key.tag, str(key.value)))
                waiting.append(value)
        else:
            waiting += node.value
    return None


TMPDIR, TEMPORARY = "TMPDIR", "falaj"
UNSEEN_LIMIT_S = 7 * 86_400.0


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder of this process's own, for as long as the context; only its owner may enter it.

    What killed processes left under the same parent and prefix is removed first.

    Args:
        prefix: beginning of the folder's name.
        parent: exists; the folder of temporary files where None.
    """
    folder = new_folder(prefix, parent)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_folder(prefix: str, parent: Path | None = None) -> Path:
    """As `scratch_folder`, for whoever removes it by other means."""
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(parent, prefix)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}-{ProcessName.of_this().token}-", dir=parent))


@contextmanager
def temporary_files() -> Iterator[None]:
    """Keep the temporary files of a process, of its libraries and of all it starts in one folder.

    The folder goes in the end, or with the next process that keeps its own if this one is killed.
    To be entered first: a library keeps the name of the folder that it found.
    """
    before = tempfile.tempdir
    with scratch_folder(TEMPORARY) as folder, variables_set({TMPDIR: str(folder)}):
        tempfile.tempdir = str(folder)
        try:
            yield
        finally:
            tempfile.tempdir = before


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove this user's `<parent>/<prefix>-<token>-...` whose processes have ended.

    A process of another machine, boot or container cannot be seen from here; its files count as
    abandoned when nothing in them has changed for a week.
    """
    mine = ProcessName.of_this()
    name = re.compile(rf"{re.escape(prefix)}-({TOKEN})-")
    for path in parent.iterdir():
        found = name.match(path.name)
        if found and _is_abandoned(path, mine.sees_alive(found[1])):
            with suppress(OSError):  # what stays hinders nobody, and the next process tries again
                remove(path)


def _is_abandoned(path: Path, is_alive: bool | None) -> bool:
    try:
        if path.lstat().st_uid != os.getuid():
            return False
        return _age_s(path) > UNSEEN_LIMIT_S if is_alive is None else not is_alive
    except FileNotFoundError:  # its owner has just removed it
        return False


def _age_s(path: Path) -> float:
    """Seconds since anything in it has changed."""
    below = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    newest: float = max(each.lstat().st_mtime for each in (path, *below))
    return time.time() - newest


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it; another may have done so meanwhile."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
