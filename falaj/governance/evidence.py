"""`falaj evidence`: what the commands show for the controls of a framework, signed.

The catalogue of a framework, such as ISO/IEC 27001:2022, is a file of `frameworks/`.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from falaj.context import (
    EXIT_DATA,
    EXIT_FAILED,
    EXIT_NOT_RUNNING,
    EXIT_WRONG_INPUT,
    Here,
    Shown,
    row,
)
from tasks.governance.journal import process_identity
from tasks.kernel.errors import ConfigurationError, DataContractError, SignatureError
from tasks.kernel.files import private_folder, read_yaml, replacing, write_atomically
from tasks.kernel.keys.choice import key_store, trusted_keys
from tasks.kernel.keys.signed import read_signed, signed
from tasks.kernel.keys.store import EVIDENCE
from tasks.kernel.settings import PROJECT_ROOT, bring, children

FOLDER = Path(__file__).parent / "frameworks"
MANIFEST, PAGE = "manifest.json", "page.html"
LARGEST_MANIFEST = 2**24
LIMIT_S = 600
"""For one command."""
ANY = "*"
State = Literal["shown", "not all well", "cannot be shown here", "could not be run"]


class Control(BaseModel, frozen=True, extra="forbid"):
    """One control of a catalogue: what answers it, and when the answer is good."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    title: str
    question: str
    command: str = ""
    files: str = ""
    """A pattern, in place of a command."""
    within: Literal["state", "checkout"] = "state"
    made_by: str = ""
    needs: tuple[str, ...] = ()
    decides: dict[str, Any] = {}
    not_shown: str = Field(min_length=1)

    @property
    def repeat(self) -> str:
        """What a person types to see the same."""
        return f"falaj {self.command}" if self.command else self.made_by


@dataclass(frozen=True)
class Answer:
    """What was seen; `code` is None where no command was run to its end."""

    document: Any
    code: int | None
    said: str
    seconds: float


def evidence(
    *, framework: str = "iso27001", out: Path = Path(), check: Path | None = None, context: Here
) -> Shown:
    """Collect what the commands show for a framework's controls: a page and a signed archive.

    Exit code 0 where all was asked, whatever the answers; 1 where a command could not be run. With
    --check 4 where a file was changed, 1 where no trusted key signed it.

    Args:
        framework: Whose controls.
        out: Folder in which the page's folder and the archive are made.
        check: Verify this archive instead, its signature and the digest of each file.

    Raises:
        ConfigurationError: there is no such framework, or no state folder.
        SignatureError: the archive is signed by a key that is not trusted, or was changed.
        DataContractError: it is no such archive.

    Examples:
        falaj evidence --framework iso27001
        falaj evidence --check evidence-iso27001-20261127T060000Z.zip
    """
    if check is not None:
        return _check(check, context.home)
    title, controls = read_framework(framework)
    if not (home := context.home).is_dir():
        raise ConfigurationError(
            f"there is no state folder {home}; name one with --home or FALAJ_HOME"
        )
    asked, now = cache(_run), datetime.now(UTC).replace(microsecond=0)
    answers = [asked(c.command) if c.command else _read(c, home) for c in controls]
    judged = [(c, a, judge(c, a)) for c, a in zip(controls, answers, strict=True)]
    files = {
        f"answers/{control.id}.json": json.dumps(
            {**control.model_dump(), "state": state, "answer": asdict(answer)}, indent=1
        ).encode()
        for control, answer, state in judged
    }
    about: dict[str, Any] = {"framework": framework, "title": title, "time": now.isoformat()}
    about |= {"falaj": version("falaj"), "who": process_identity()}
    counts = Counter(state for _, _, state in judged)
    files[PAGE] = _page(judged=judged, counts=counts, now=now, **about).encode()
    digests = {n: {"sha256": _sha256(each), "bytes": len(each)} for n, each in files.items()}
    files[MANIFEST] = signed(key_store(home), {**about, "files": digests}).encode()
    folder = out / f"evidence-{framework}-{now:%Y%m%dT%H%M%SZ}"
    archive = _write(folder, files, now)
    shown = [{"id": c.id, "title": c.title, "state": s, "repeat": c.repeat} for c, _, s in judged]
    lines = [f"{each['id']:<8}{each['state']:<22}{each['title']}" for each in shown]
    lines += [row("Page", folder / PAGE), row("Archive", archive)]
    facts = {**about, "page": folder / PAGE, "archive": archive, "states": counts}
    code = EXIT_FAILED if counts["could not be run"] else 0
    return Shown({**facts, "controls": shown}, lines, code)


def read_framework(name: str) -> tuple[str, list[Control]]:
    """Title and controls of a framework.

    Raises:
        ConfigurationError: there is none of that name, or its file is wrong.
    """
    known = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}
    if name not in known:
        raise ConfigurationError(f"no framework {name!r}; there is {', '.join(known)}")
    content = read_yaml(known[name], name)
    try:
        return str(content["title"]), TypeAdapter(list[Control]).validate_python(
            content["controls"]
        )
    except (KeyError, ValidationError) as exc:
        raise ConfigurationError(f"{known[name]} is no catalogue: {exc}") from exc


def judge(control: Control, answer: Answer) -> State:
    """Whether an answer is good; what is not clear is not."""
    if answer.code is None:
        return "could not be run"
    if answer.code in (EXIT_WRONG_INPUT, EXIT_NOT_RUNNING):
        return "cannot be shown here"
    if answer.code == EXIT_FAILED and answer.document is None:  # such as: nothing is registered
        return "cannot be shown here"
    if answer.code:
        return "not all well"
    if not all(any(_at(answer.document, place)) for place in control.needs):
        return "cannot be shown here"
    for place, wanted in control.decides.items():
        found = _at(answer.document, place)
        if not found or not all(bool(v) if wanted == ANY else v == wanted for v in found):
            return "not all well"
    return "shown"


def _at(document: Any, place: str) -> list[Any]:
    """Values at a path of names; `*` is every name."""
    values = [document]
    for name in filter(None, place.split("/")):
        inside = [dict(enumerate(v)) if isinstance(v, list) else v for v in values]
        named = [v for v in inside if isinstance(v, dict)]
        values = [e for v in named for key, e in v.items() if name in (ANY, key)]
    return values


def _run(command: str) -> Answer:
    """Ask in a process of its own, as a person would."""
    line, began = [sys.executable, "-m", "falaj", *shlex.split(command), "--json"], time.monotonic()
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Answer(None, None, f"no answer within {LIMIT_S} s", LIMIT_S)
    said = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    code: int | None = done.returncode
    try:
        document = json.loads(done.stdout)
    except ValueError:
        document = None
        if not done.returncode or not said.startswith(("failed: ", "refused: ")):
            code = None  # it broke, and did not say why as our commands do
    return Answer(document, code, said, round(time.monotonic() - began, 2))


def _read(control: Control, home: Path) -> Answer:
    """Files by their names; what is signed only as a trusted key signed it."""
    root, found = home if control.within == "state" else PROJECT_ROOT, dict[str, Any]()
    pattern = root / control.files
    for file in (each for each in children(pattern.parent) if each.match(pattern.name)):
        text = bring(file).read_text(encoding="utf-8")
        try:
            found[file.name] = json.loads(text)
            if "signature" in found[file.name]:
                found[file.name] = read_signed(trusted_keys(home, EVIDENCE), text, file.name)
        except (ValueError, SignatureError) as exc:
            return Answer(found, EXIT_DATA, f"{file.name}: {exc}", 0)
    return Answer(found, 0, "", 0)


def _page(**shown: Any) -> str:
    from tasks.reporting.page import page_environment

    return page_environment().get_template("evidence.html.j2").render(**shown)


def _write(folder: Path, files: dict[str, bytes], now: datetime) -> Path:
    """The files in a new folder, and the same in an archive beside it.

    The archive is not compressed, so that each byte of a file is one of the archive's.
    """
    if folder.exists():
        raise ConfigurationError(f"{folder} exists already; run it again. Nothing was written")
    for name, content in files.items():
        private_folder((folder / name).parent)
        write_atomically(folder / name, content, private=True)
    archive = folder.with_name(f"{folder.name}.zip")
    with replacing(archive, private=True) as aside, zipfile.ZipFile(aside, "w") as opened:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, now.timetuple()[:6])
            info.external_attr = 0o600 << 16
            opened.writestr(info, files[name])
    return archive


def _check(archive: Path, home: Path) -> Shown:
    """Compare an archive with its signed manifest; nothing of it is unpacked."""
    what = f"the {MANIFEST} of {archive}"
    try:
        with zipfile.ZipFile(archive) as opened:
            held = Counter(opened.namelist())
            if held[MANIFEST] != 1 or opened.getinfo(MANIFEST).file_size > LARGEST_MANIFEST:
                raise zipfile.BadZipFile(f"expected one {MANIFEST} of at most 16 MiB")
            text = opened.read(MANIFEST).decode()
            about = read_signed(trusted_keys(home, EVIDENCE), text, what)
            if not isinstance(about, dict) or "framework" not in about:  # a certificate, perhaps
                raise SignatureError(f"{what} is none of evidence. Nothing of it was used")
            files = about["files"]
            changed = sorted(_differing(opened, files))
    except (OSError, *_UNREADABLE) as exc:
        raise DataContractError(
            f"{archive} is no archive of evidence that can be read: {exc}; give the .zip that "
            "`falaj evidence` wrote"
        ) from exc
    wrong = {
        "changed": changed,
        "missing": sorted({*files} - {*held}),
        "added": sorted(n for n, num in held.items() if num > 1 or n not in {*files, MANIFEST}),
    }
    lines = [row(kind, name) for kind, names in wrong.items() for name in names]
    end = f"{about['title']}, {about['time']}, {len(files)} files"
    is_whole = not any(wrong.values())
    lines.append(f"{end}: {'as they were signed' if is_whole else 'NOT as they were signed'}")
    return Shown({**about, **wrong}, lines, 0 if is_whole else EXIT_DATA)


_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)
"""What `zipfile` raises of damaged, encrypted and strange content."""


def _differing(opened: zipfile.ZipFile, files: dict[str, Any]) -> Iterator[str]:
    """Names whose content is not what was signed; none is read beyond its signed size."""
    for info in opened.infolist():
        if (known := files.get(info.filename)) is None:
            continue
        seen = ""
        if info.file_size == known["bytes"] and info.compress_type == zipfile.ZIP_STORED:
            try:
                seen = _sha256(opened.read(info))
            except _UNREADABLE:
                seen = ""
        if seen != known["sha256"]:
            yield info.filename


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
