"""The state folder of one machine, encrypted by gocryptfs: AES-256-GCM, file by file, by FUSE.

    <home>.encrypted/files/         what is on the disk
    <home>.encrypted/settings.json  name and address of the key, and the password, encrypted by it
    <home>/                         what programs see, while it is mounted

SQLite, memory-mapped files, checkpoints and logs need no change for it. The password never changes,
so a rotated key encrypts 44 bytes anew; a destroyed one leaves nothing to read once the folder is
not mounted.
"""

import json
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tasks.kernel.errors import ConfigurationError, LostKeyError, StorageError
from tasks.kernel.files import digest_of, locked, make_folder, private_folder, write_atomically
from tasks.kernel.keys.address import KEYS, keys_at
from tasks.kernel.keys.encryption import ENCRYPTION

PROGRAM = "gocryptfs"


def open_state(home: Path, environment: MutableMapping[str, str]) -> None:
    """See that a state folder which is to be encrypted is, and mount it where it is not mounted.

    Args:
        home: the state folder.
        environment: of this process; gets what the folder's settings say and nobody set.

    Raises:
        ConfigurationError: it is to be encrypted and is not.
        LostKeyError: its key is gone.
        StorageError: it cannot be mounted.
    """
    if (found := _settings(home)) is not None:
        for variable in (ENCRYPTION, KEYS):
            environment.setdefault(variable, found[variable])
        with locked(_folder(home) / "lock"):
            if not home.is_mount():
                _mount(home, _password(found))
            if _plain(home).exists():  # of a call that was cut off
                shutil.rmtree(_plain(home))
        # What libraries put aside is as confidential as what they read.
        environment["TMPDIR"] = str(private_folder(home / "spill"))
        tempfile.tempdir = None
    elif (name := environment.get(ENCRYPTION)) and not home.is_mount():
        if (keys := environment.get(KEYS)) and not _holds_files(home):
            encrypt_state(home, name, keys)  # a new one
            return
        raise ConfigurationError(
            f"{ENCRYPTION} is set, and {home} is not encrypted; run `falaj encryption enable`, or "
            "mount an encrypted file system there. Nothing was done"
        )


def encrypt_state(home: Path, name: str, keys: str) -> int:
    """Encrypt a state folder that nobody works in; a call that was cut off is completed.

    Args:
        home: the folder; need not exist.
        name: of the key.
        keys: address of the key store.

    Returns:
        Number of its files.

    Raises:
        ConfigurationError: gocryptfs is not there, or the key store is.
        StorageError: the disk refused, or what was copied differs; the folder is as it was.
    """
    folder = Path(unquote(urlsplit(keys).path))
    if urlsplit(keys).scheme == "file" and folder.is_relative_to(home):
        raise ConfigurationError(
            f"{keys} lies in {home}, which its keys are to encrypt; name a folder elsewhere, best "
            "on another disk, or OpenBao. Nothing was changed"
        )
    found, plain = _settings(home), _plain(home)
    if found is None:
        if plain.exists() or home.is_mount():
            seen = plain if plain.exists() else f"a mount at {home}"
            raise ConfigurationError(
                f"there is {seen}, and nothing that was encrypted here; move it away, or where the "
                f"mount is encrypted itself set {ENCRYPTION} and {KEYS}. Nothing was changed"
            )
        _copy_encrypted(home, name, keys)
    elif (found[ENCRYPTION], found[KEYS]) != (name, keys):
        raise ConfigurationError(
            f"{home} is encrypted by the key {found[ENCRYPTION]!r} of {found[KEYS]}; expected that "
            "name and address. Nothing was changed"
        )
    elif _holds_files(home) and (plain.exists() or not _is_copied(home, _password(found))):
        raise ConfigurationError(
            f"{home} holds files, and is where {_folder(home)} is mounted: look at them, and move "
            "them away. Nothing was changed"
        )
    if _holds_files(home):  # what was copied
        home.rename(plain)
    open_state(home, os.environ)
    return sum(path.is_file() for path in home.rglob("*"))


def lock_state(home: Path) -> None:
    """Unmount a state folder; the next command mounts it again.

    Raises:
        StorageError: somebody works in it.
    """
    if home.is_mount():
        _run("fusermount", "-u", str(home))


def encrypt_password_again(home: Path) -> None:
    """Let the newest version of the key encrypt the password.

    Raises:
        LostKeyError: the key is gone.
    """
    if (found := _settings(home)) is not None:
        _write_settings(home, found[ENCRYPTION], found[KEYS], _password(found))


def _plain(home: Path) -> Path:
    """What the encrypted folder was made from, until it is removed."""
    return home.with_name(f"{home.name}.before-encryption")


def _holds_files(home: Path) -> bool:
    """Whether something lies in the folder itself, and not in what is mounted there."""
    return not home.is_mount() and home.is_dir() and any(home.iterdir())


def _is_copied(home: Path, password: str) -> bool:
    """Whether the encrypted folder holds what lies in the folder itself."""
    aside = home.with_name(f"{home.name}.encrypting")
    if not aside.is_mount():
        _mount(aside, password, _folder(home))
    try:
        return digest_of(aside) == digest_of(home)
    finally:
        lock_state(aside)
        aside.rmdir()


def _copy_encrypted(home: Path, name: str, keys: str) -> None:
    folder, aside = _folder(home), home.with_name(f"{home.name}.encrypting")
    if aside.is_mount():  # a call that was cut off
        lock_state(aside)
    shutil.rmtree(folder, ignore_errors=True)
    make_folder(private_folder(folder) / "files")
    password = secrets.token_urlsafe(32)
    _run(PROGRAM, "-q", "-init", "-nosyslog", str(folder / "files"), text=password)
    _mount(aside, password, folder)
    try:
        if home.exists():
            shutil.copytree(home, aside, symlinks=True, ignore=_passing, dirs_exist_ok=True)
            if (seen := digest_of(aside)) != digest_of(home):
                raise StorageError(
                    f"{aside} is no true copy of {home} ({seen[:12]}): somebody works in it, or "
                    "the disk is damaged. It was not changed; stop what works there and run again"
                )
    finally:
        lock_state(aside)
        aside.rmdir()
    # From now on the copy counts; the plain folder only has to make way.
    _write_settings(home, name, keys, password)


def _passing(folder: str, names: list[str]) -> list[str]:
    """Sockets and pipes, which are of processes that ended."""
    kinds = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
    return [name for name, mode in kinds if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)]


def _mount(home: Path, password: str, folder: Path | None = None) -> None:
    if _holds_files(home):
        there = ", ".join(sorted(path.name for path in home.iterdir())[:5])
        raise ConfigurationError(
            f"{home} is encrypted and not mounted, and {there} lie in its place; look at them and "
            "move them away, or run again the `falaj encryption enable` that was cut off"
        )
    make_folder(home)
    files = (folder or _folder(home)) / "files"
    options = ("-q", "-nosyslog", "-noprealloc", "-kernel_cache")  # nobody else writes there
    _run(PROGRAM, *options, str(files), str(home), text=password)


def _run(*command: str, text: str = "") -> None:
    program = shutil.which(command[0])
    if program is None:
        raise ConfigurationError(
            f"{command[0]} is not installed, which mounts the encrypted state folder; install it "
            "(on Debian and Ubuntu: gocryptfs, fuse3). Nothing was read"
        )
    with open(os.memfd_create("output"), "w+") as said:  # a pipe stays open with the mount
        line = [program, *command[1:]]
        code = subprocess.run(line, input=text, stdout=said, stderr=said, text=True, check=False)
        said.seek(0)
        reason = " ".join(said.read().split())[-300:]
    if code.returncode:
        raise StorageError(
            f"{' '.join(command)}: {reason}. Expected /dev/fuse, a key that fits, and nobody in a "
            "folder that is to be unmounted. Nothing was read"
        )


def _settings(home: Path) -> dict[str, str] | None:
    try:
        found = json.loads((_folder(home) / "settings.json").read_text())
        return {name: str(found[name]) for name in (ENCRYPTION, KEYS, "password")}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as exc:
        raise LostKeyError(
            f"{_folder(home) / 'settings.json'} is damaged; without it {home} cannot be read. "
            "Bring it from a copy. Nothing was changed"
        ) from exc


def _password(found: dict[str, str]) -> str:
    return keys_at(found[KEYS]).decrypt(found[ENCRYPTION], found["password"]).decode()


def _write_settings(home: Path, name: str, keys: str, password: str) -> None:
    encrypted = keys_at(keys).encrypt(name, password.encode())
    content = {ENCRYPTION: name, KEYS: keys, "password": encrypted}
    write_atomically(_folder(home) / "settings.json", json.dumps(content), private=True)


def _folder(home: Path) -> Path:
    return home.with_name(f"{home.name}.encrypted")
