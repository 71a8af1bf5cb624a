"""The encrypted state folder: nothing readable on the disk, all of it through the mount.

Needs gocryptfs and /dev/fuse.
"""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from falaj.__main__ import main
from tasks.kernel.errors import ConfigurationError, LostKeyError, StorageError
from tasks.kernel.keys.choice import key_store, trusted_keys
from tasks.kernel.keys.files import FileKeys
from tasks.kernel.keys.store import check_signature
from tasks.state import encrypted_folder
from tasks.state.encrypted_folder import encrypt_state, lock_state, open_state

pytestmark = pytest.mark.skipif(
    shutil.which("gocryptfs") is None or not Path("/dev/fuse").exists(),
    reason="gocryptfs is not installed, or there is no /dev/fuse",
)
MARKER = b"a plaintext marker"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder with the marker in a file, a database and a name."""
    for name in ("FALAJ_ENCRYPTION", "FALAJ_KEYS", "TMPDIR"):  # what a test leaves goes with it
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    (home / "feast").mkdir(parents=True)
    (home / "feast" / MARKER.decode().replace(" ", "-")).write_bytes(MARKER)
    with closing(sqlite3.connect(home / "state.db")) as database:
        database.execute("CREATE TABLE t AS SELECT ? AS x", [MARKER.decode()])
        database.commit()
    (home / "link").symlink_to("feast")
    yield home
    for place in (home, home.with_name("home.encrypting")):
        lock_state(place)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return (tmp_path / "keys").as_uri()


def on_disk(home: Path) -> list[Path]:
    """Files beside the mount that show the marker, by name or content."""
    shown = [MARKER, MARKER.replace(b" ", b"-")]
    files = [path for path in home.parent.rglob("*") if not path.is_relative_to(home)]
    return [
        path
        for path in files
        if any(
            m in str(path).encode() or (path.is_file() and m in path.read_bytes()) for m in shown
        )
    ]


def is_whole(home: Path) -> bool:
    with closing(sqlite3.connect(home / "state.db")) as database:
        rows = database.execute("SELECT x FROM t").fetchall()
    names = sorted(path.name for path in (home / "link").iterdir())
    return (rows, names) == ([(MARKER.decode(),)], [MARKER.decode().replace(" ", "-")])


def test_nothing_is_readable_on_the_disk_and_all_through_the_mount(home: Path, keys: str) -> None:
    assert encrypt_state(home, "state", keys) == 2
    assert is_whole(home)
    (home / "later").write_bytes(MARKER)
    assert on_disk(home) == []
    lock_state(home)
    assert [*home.iterdir()] == []
    environment: dict[str, str] = {}
    open_state(home, environment)
    assert is_whole(home)
    assert (home / "later").read_bytes() == MARKER
    assert environment["FALAJ_ENCRYPTION"] == "state"
    assert Path(environment["TMPDIR"]).is_relative_to(home)


def test_a_rotation_goes_on_and_a_destroyed_key_opens_nothing(
    home: Path, keys: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypt_state(home, "state", keys)
    monkeypatch.setenv("FALAJ_HOME", str(home))
    settings = home.with_name("home.encrypted") / "settings.json"
    before = settings.read_text()
    with (home / "state.db").open("rb") as reader:  # somebody reads all the time
        assert main(["encryption", "rotate"]) == 0
        assert len(reader.read()) > 1000
    assert settings.read_text() != before
    lock_state(home)
    open_state(home, {})
    assert is_whole(home)
    assert main(["encryption", "destroy", "--yes"]) == 0
    with pytest.raises(LostKeyError):
        open_state(home, {})
    FileKeys(tmp_path / "keys").encrypt("state", b"x")  # another key of the same name
    with pytest.raises(LostKeyError):
        open_state(home, {})


@pytest.mark.parametrize("call", ["_write_settings", "lock_state", "open_state"])
def test_a_call_that_was_cut_off_loses_nothing_and_is_completed(
    call: str, home: Path, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(encrypted_folder, call, cut_off)
        with pytest.raises(KeyboardInterrupt):
            encrypt_state(home, "state", keys)
    whole = home if home.exists() else home.with_name("home.before-encryption")
    assert is_whole(whole)
    encrypt_state(home, "state", keys)
    encrypt_state(home, "state", keys)  # and again changes nothing
    assert is_whole(home)
    assert on_disk(home) == []


def test_what_cannot_be_encrypted_stays_as_it_is(
    home: Path, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="elsewhere"):
        encrypt_state(home, "state", (home / "keys").as_uri())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigurationError, match="gocryptfs"):
        encrypt_state(home, "state", keys)
    assert is_whole(home)


def test_a_folder_that_should_be_encrypted_and_is_not_refuses_all_work(home: Path) -> None:
    with pytest.raises(ConfigurationError, match="falaj encryption enable"):
        open_state(home, {"FALAJ_ENCRYPTION": "state"})


def test_a_key_that_is_away_loses_nothing(home: Path, keys: str, tmp_path: Path) -> None:
    encrypt_state(home, "state", keys)
    lock_state(home)
    (tmp_path / "keys").rename(tmp_path / "away")
    (home / "run.lock").touch()  # a command looked
    for name, address in (("state", keys), ("state", (tmp_path / "others").as_uri())):
        with pytest.raises(ConfigurationError):
            encrypt_state(home, name, address)
    (tmp_path / "away").rename(tmp_path / "keys")
    with pytest.raises(ConfigurationError, match=r"run\.lock"):
        open_state(home, {})
    (home / "run.lock").unlink()
    open_state(home, {})
    assert is_whole(home)


def test_what_others_call_so_is_not_removed_and_what_was_left_is(home: Path, keys: str) -> None:
    other = home.with_name("home.before-encryption")
    other.mkdir()
    with pytest.raises(ConfigurationError, match="before-encryption"):
        encrypt_state(home, "state", keys)
    assert other.is_dir()
    assert is_whole(home)
    other.rmdir()
    encrypt_state(home, "state", keys)
    other.mkdir()  # as of a call that was cut off while it removed
    open_state(home, {})
    assert not other.exists()


def test_a_new_state_folder_is_encrypted_from_the_start(home: Path, keys: str) -> None:
    new = home.with_name("new")
    open_state(new, {"FALAJ_ENCRYPTION": "state", "FALAJ_KEYS": keys})
    assert new.is_mount()
    lock_state(new)


def test_what_was_signed_before_stays_trusted(home: Path, keys: str) -> None:
    signature = key_store(home).sign("models", b"x")
    encrypt_state(home, "state", keys)
    check_signature(trusted_keys(home, "models"), b"x", signature, "it")


def test_a_folder_in_use_is_not_locked(home: Path, keys: str) -> None:
    encrypt_state(home, "state", keys)
    with (home / "state.db").open("rb"), pytest.raises(StorageError, match="busy"):
        lock_state(home)


def test_the_command_line_encrypts_opens_and_locks(home: Path, keys: str) -> None:
    def falaj(*words: str) -> str:
        line = [sys.executable, "-m", "falaj", "--home", str(home), *words]
        ended = subprocess.run(line, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    falaj("encryption", "enable", "--keys", keys)
    assert is_whole(home)
    falaj("encryption", "lock")
    assert not home.is_mount()
    falaj("audit")  # any command opens it
    assert is_whole(home)
    assert on_disk(home) == []
