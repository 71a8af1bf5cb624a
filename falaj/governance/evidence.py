"""`falaj evidence`: what the commands show for the controls of a framework, signed.

The catalogue of a framework, such as ISO/IEC 27001:2022, is a file of `frameworks/`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from falaj.context import EXIT_DATA, EXIT_FAILED, EXIT_NOT_RUNNING, Here, Shown, row
from tasks.governance.journal import process_identity
from tasks.kernel.errors import ConfigurationError, DataContractError, SignatureError
from tasks.kernel.files import private_folder, read_yaml, replacing, write_atomically
from tasks.kernel.keys.choice import key_store, trusted_keys
from tasks.kernel.keys.signed import read_signed, signed
from tasks.kernel.keys.store import EVIDENCE
from tasks.kernel.settings import PROJECT_ROOT, bring, children
from tasks.kernel.values import checked

FOLDER = Path(__file__).parent / "frameworks"
MANIFEST, PAGE = "manifest.json", "page.html"
LARGEST_MANIFEST, LIMIT_S = 2**24, 600
"""Bytes; seconds for one command."""
State = Literal["shown", "not all well", "cannot be shown here", "could not be run"]


class Control(BaseModel, frozen=True, extra="forbid"):
    """One control of a catalogue: what answers it, and when the answer is good."""

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    title: str
    question: str
    command: str = Field(min_length=1)
    files: str = ""
    """A pattern of what the command made before; without it the command is run."""
    within: Literal["state", "checkout"] = "state"
    needs: tuple[str, ...] = ()
    decides: dict[str, Any] = {}
    not_shown: str = Field(min_length=1)


class Framework(BaseModel, frozen=True, extra="forbid"):
    """A catalogue."""

    title: str
    controls: tuple[Control, ...]


class Answer(NamedTuple):
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
    catalogue, home = read_framework(framework), context.home
    if not home.is_dir():
        seen = f"there is no state folder {home}"
        raise ConfigurationError(f"{seen}; name one with --home or FALAJ_HOME")
    from tasks.reporting.page import page_environment

    now, judged, files = datetime.now(UTC), [], {}
    for control in catalogue.controls:
        answer = _read(control, home) if control.files else run_command(control.command)
        judged.append((control, answer, judge(control, answer)))
        facts = {**control.model_dump(), "state": judged[-1][2], "answer": answer._asdict()}
        files[f"answers/{control.id}.json"] = json.dumps(facts, indent=1).encode()
    states = Counter(state for _, _, state in judged)
    about: dict[str, Any] = {"framework": framework, "title": catalogue.title}
    about |= {"time": f"{now:%FT%TZ}", "falaj": version("falaj"), "who": process_identity()}
    template = page_environment().get_template("evidence.html.j2")
    files[PAGE] = template.render(judged=judged, states=states, now=now, **about).encode()
    digests = {n: {"sha256": sha256(c).hexdigest(), "bytes": len(c)} for n, c in files.items()}
    files[MANIFEST] = signed(key_store(home), {**about, "files": digests}).encode()
    folder = out / f"evidence-{framework}-{now:%Y%m%dT%H%M%SZ}"
    about |= {"page": folder / PAGE, "archive": _write(folder, files, now), "states": states}
    about["controls"] = [{"id": c.id, "state": s, "command": c.command} for c, _, s in judged]
    lines = [f"{c.id:<8}{state:<22}{c.title}" for c, _, state in judged]
    lines += [row("Page", about["page"]), row("Archive", about["archive"])]
    return Shown(about, lines, EXIT_FAILED if states["could not be run"] else 0)


def read_framework(name: str) -> Framework:
    """The catalogue of that name.

    Raises:
        ConfigurationError: there is none, or its file is wrong.
    """
    known = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}
    if name not in known:
        raise ConfigurationError(f"no framework {name!r}; there is {', '.join(known)}")
    content = read_yaml(known[name], name)
    return checked(Framework, content, str(known[name]), "Nothing was asked")


def judge(control: Control, answer: Answer) -> State:
    """Whether an answer is good; what is not clear is not."""
    if answer.code is None:
        return "could not be run"
    says_why = answer.document is None and answer.code < EXIT_NOT_RUNNING
    if (says_why and answer.code) or answer.code == EXIT_NOT_RUNNING:  # nothing is registered, say
        return "cannot be shown here"
    if answer.code:
        return "not all well"
    if not all(any(_at(answer.document, place)) for place in control.needs):
        return "cannot be shown here"
    for place, wanted in control.decides.items():
        found = _at(answer.document, place)
        if not found or not all(bool(v) if wanted == "*" else v == wanted for v in found):
            return "not all well"
    return "shown"


def _at(document: Any, place: str) -> list[Any]:
    """Values at a path of names; `*` is every name."""
    values = [document]
    for name in filter(None, place.split("/")):
        inside = [dict(enumerate(v)) if isinstance(v, list) else v for v in values]
        named = [v for v in inside if isinstance(v, dict)]
        values = [e for v in named for key, e in v.items() if name in ("*", key)]
    return values


def run_command(command: str, environment: Mapping[str, str] = os.environ) -> Answer:
    """Ask in a process of its own, as a person would."""
    line = [sys.executable, "-m", *shlex.split(command), "--json"]
    began, closed = time.monotonic(), subprocess.DEVNULL
    try:
        done = subprocess.run(
            line, stdin=closed, capture_output=True, text=True, timeout=LIMIT_S, env=environment
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
            changed = sorted({*files} & {*held} - {*_whole(opened, files)})
    except (OSError, *_UNREADABLE) as exc:
        seen = f"{archive} is no archive of evidence that can be read: {exc}"
        raise DataContractError(f"{seen}; give the .zip that `falaj evidence` wrote") from exc
    added = sorted(n for n, num in held.items() if num > 1 or n not in {*files, MANIFEST})
    wrong = {"changed": changed, "missing": sorted({*files} - {*held}), "added": added}
    lines = [row(kind, name) for kind, names in wrong.items() for name in names]
    code, said = (EXIT_DATA, "NOT as they were signed") if lines else (0, "as they were signed")
    lines.append(f"{about['title']}, {about['time']}, {len(files)} files: {said}")
    return Shown({**about, **wrong}, lines, code)


_UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)
"""What `zipfile` raises of damaged, encrypted and strange content."""


def _whole(opened: zipfile.ZipFile, files: dict[str, Any]) -> Iterator[str]:
    """Names whose content is what was signed; none is read beyond its signed size."""
    for info in opened.infolist():
        known, is_plain = files.get(info.filename, {}), info.compress_type == zipfile.ZIP_STORED
        if is_plain and info.file_size == known.get("bytes"):
            with suppress(*_UNREADABLE):
                if sha256(opened.read(info)).hexdigest() == known["sha256"]:
                    yield info.filename
