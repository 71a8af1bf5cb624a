"""What tools find in this repository, held against named waivers: `make scan`.

    python -m infra.scan [--advisories]

`waivers.yaml` beside this names what is let be, and why; `secrets.json`, detect-secrets' own
baseline, holds the digests of made-up secrets. The result goes to `.scan/result.json`.

Exit codes: 0 nothing is open; 1 a finding without a waiver, a waiver without its findings, a tool
that could not look, or, with `--advisories`, no advisory feed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, Field, PositiveInt, TypeAdapter

from infra.bench.results import checked_out
from infra.licences import faults, required
from tasks.kernel.settings import PROJECT_ROOT, tool_python

FOLDER = Path(__file__).parent
CODE = ("falaj", "flows", "tasks", "infra", "serving", "feature_repo")
LOCK = "infra/requirements.lock"
FUZZER = "tests/contracts/serving/test_clients.py"
RESULT = PROJECT_ROOT / ".scan" / "result.json"


class Finding(NamedTuple):
    """One thing that a tool reports."""

    rule: str
    path: str
    line: int
    text: str


class Waiver(BaseModel, frozen=True, extra="forbid"):
    """Findings that are let be."""

    tool: str
    rule: str  # or a pattern of rules
    path: str  # of a file, or a pattern
    count: PositiveInt | None = None  # exactly; None: at least one
    reason: str = Field(min_length=20)


class NotCheckedError(Exception):
    """A tool could not look."""


def judge(findings: Sequence[Finding], waivers: Sequence[Waiver]) -> tuple[int, list[str]]:
    """How many findings are waived; a line for each that is not, and for each waiver gone stale."""
    named = {
        f: next((w for w in waivers if fnmatch(f.rule, w.rule) and fnmatch(f.path, w.path)), None)
        for f in findings
    }
    lines = [f"{f.path}:{f.line}: {f.rule}: {f.text}" for f, w in named.items() if w is None]
    covered = Counter(named.values())
    stale = [
        f"waivers.yaml: {w.tool} {w.rule} {w.path} covers {covered[w]} findings, expected "
        f"{w.count or 'at least one'}; read that code again, then correct the waiver"
        for w in waivers
        if covered[w] != (w.count or max(covered[w], 1))
    ]
    return len(named) - len(lines), lines + stale


def run(name: str, *words: str | Path) -> Any:
    """What a tool of `.venv-scan` prints as JSON; None where it prints nothing.

    Raises:
        NotCheckedError: there is no such tool, or it reports errors of its own.
    """
    if (python := tool_python("scan")) is None:
        raise NotCheckedError("no .venv-scan; `make scan` makes it")
    line: list[str | Path] = [python.with_name(name), *words]
    done = subprocess.run(line, cwd=PROJECT_ROOT, capture_output=True, text=True)
    if done.stderr and not done.stdout:
        raise NotCheckedError(done.stderr.strip().rpartition("\n")[2])
    seen = json.loads(done.stdout or "null")
    if seen and seen.get("errors"):
        raise NotCheckedError(str(seen["errors"]))
    return seen


def semgrep() -> Iterator[Finding]:
    """Our own rules, once each has found its examples."""
    rules = FOLDER / "rules"
    words = ("scan", "--metrics=off", "--disable-version-check", "--json", "--config", rules)
    tested = run("semgrep", *words, "--test", "tests/support/scan")["results"].values()
    checks = [check for file in tested for check in file["checks"].items()]
    if not checks or not all(check["passed"] for _, check in checks):
        raise NotCheckedError(f"rules that miss their examples: {checks}")
    for each in run("semgrep", *words, *CODE)["results"]:
        rule = each["check_id"].rpartition(".")[2]
        yield Finding(rule, each["path"], each["start"]["line"], each["extra"]["message"])


def bandit() -> Iterator[Finding]:
    """Bandit's own checks."""
    for each in run("bandit", "--quiet", "--format=json", "--recursive", *CODE)["results"]:
        yield Finding(each["test_id"], each["filename"], each["line_number"], each["issue_text"])


def secrets() -> Iterator[Finding]:
    """What looks like a secret, in all files of git; another rule where the baseline lacks it."""
    with tempfile.TemporaryDirectory() as folder:  # the tool writes into its baseline
        copy = Path(shutil.copy(FOLDER / "secrets.json", folder))
        run("detect-secrets", "scan", "--baseline", copy)
        files = [json.loads(f.read_text())["results"] for f in (FOLDER / "secrets.json", copy)]
    known, seen = (
        {(each["type"], path, each["hashed_secret"]) for path in file for each in file[path]}
        for file in files
    )
    for kind, path, digest in known | seen:
        rule = kind if (kind, path, digest) in known & seen else "other than secrets.json"
        yield Finding(rule, path, 1, f"{kind} {digest[:12]}")


def licences() -> Iterator[Finding]:
    """Licences of what is required, as our own reader has them."""
    yield from (Finding("licence", "pyproject.toml", 1, line) for line in faults(required()))


def advisories() -> Iterator[Finding]:
    """Known vulnerabilities of what is locked, as osv.dev has them.

    A package registry is not asked: a mirror without advisories answers as if there were none.
    """
    words = ("--format=json", "--vulnerability-service=osv", "--disable-pip", "--require-hashes")
    for each in run("pip-audit", *words, "-r", LOCK)["dependencies"]:
        for known in each.get("vulns", [{"id": "skipped"}]):
            yield Finding(known["id"], LOCK, 1, each["name"])


def schemathesis() -> Iterator[Finding]:
    """A fuzzer that asks a running server, from its OpenAPI document."""
    words = ("-n0", "-q", "-p", "no:cacheprovider", "-m", "slow", "-k", "fuzzer", FUZZER)
    line = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(line, cwd=PROJECT_ROOT, capture_output=True, text=True)
    if "1 passed" not in done.stdout:
        yield Finding("fuzzer", FUZZER, 1, done.stdout[-6000:] + done.stderr[-1000:])


TOOLS = (semgrep, bandit, secrets, licences, advisories, schemathesis)


def main(arguments: Sequence[str]) -> int:
    """Run the tools, print a table, write the result; return the exit code."""
    text = (FOLDER / "waivers.yaml").read_text(encoding="utf-8")
    waivers = TypeAdapter(list[Waiver]).validate_python(yaml.safe_load(text))
    table: dict[str, dict[str, Any]] = {}
    print(f"{'tool':14}{'findings':>9}{'waived':>8}{'open':>6}{'seconds':>9}")
    for tool in TOOLS:
        began, name, note = time.monotonic(), tool.__name__, ""
        findings, waived, lines = list[Finding](), 0, list[str]()
        try:
            findings = sorted(set(tool()))
            waived, lines = judge(findings, [w for w in waivers if w.tool == name])
        except NotCheckedError as exc:
            note = f"not checked: {exc}"
            if name != "advisories" or "--advisories" in arguments or "ConnectionError" not in note:
                lines = [note]
        seconds = time.monotonic() - began
        print(f"{name:14}{len(findings):9}{waived:8}{len(lines):6}{seconds:9.1f}  {note[:60]}")
        table[name] = {"findings": len(findings), "waived": waived, "open": lines, "note": note}
    result = {"commit": checked_out(), "tools": table, "waivers": [w.model_dump() for w in waivers]}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    open_ = [f"{name}: {line}" for name, row in table.items() for line in row["open"]]
    print("\n".join(open_))
    return int(bool(open_))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
