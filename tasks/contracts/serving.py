"""Where the processes that serve a state folder say that they listen: a file and a lock for each.

A process has a number, from 0; it holds its lock as long as it lives, and its file is there while
it answers. The file of one that was killed stays until the next one of its number starts.
"""

import json
from pathlib import Path

from tasks.kernel.files import is_held

Addresses = dict[str, str | int | None]
"""What a process says of itself: `pid`, and where `http`, `grpc` and `admin` are."""


def address_file(home: Path, number: int = 0) -> Path:
    """Where a serving process writes its addresses."""
    return home / "serving" / f"server{f'-{number}' * bool(number)}.json"


def lock_file(announced: Path) -> Path:
    """That the process of an address file holds."""
    return announced.with_suffix(".lock")


def address_files(home: Path) -> list[Path]:
    """Of all processes that serve from a state folder, in the order of their numbers."""
    found = address_file(home).parent.glob("server*.json")
    return sorted(found, key=lambda file: (len(file.name), file.name))


def read_addresses(announced: Path) -> Addresses | None:
    """What a process says of itself; None where it does not answer yet, or no more."""
    try:
        found = json.loads(announced.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_live(announced: Path) -> bool:
    """Whether the process of an address file answers, or is about to end."""
    return announced.exists() and is_held(lock_file(announced))


def live_addresses(home: Path) -> list[Addresses]:
    """What each live process on this machine says of itself."""
    live = filter(is_live, address_files(home))
    return [found for file in live if (found := read_addresses(file)) is not None]


def is_served(home: Path) -> bool:
    """Whether a process serves from a state folder, or is about to start or to end."""
    return any(is_held(lock) for lock in address_file(home).parent.glob("server*.lock"))
