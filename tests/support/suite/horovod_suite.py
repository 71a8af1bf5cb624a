"""Run Horovod's own tests for PyTorch on the wheel that this project builds.

They are not part of Horovod's source distribution, so its repository is cloned, or a checkout that
is there already is taken (it is not written into). The tests count by their digests.

    python -m tests.support.suite.horovod_suite [CHECKOUT]

Operations run on two ranks over Gloo, each under this project's rendezvous; elastic training under
Horovod's own launcher, on this host. Exit code 1 where a test failed that is not listed below with
its reason, or where a listed one passed. Takes about two and a half minutes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

from tasks.training.launch.rendezvous import HOST_NAME, LOOPBACK, rank_variables

REPOSITORY = "https://github.com/horovod/horovod"
RELEASE = "v0.28.1"
DIGESTS = {
    "test/parallel/test_torch.py": (
        "8af114f63fb7a87271322ad2da2c7050c3a9028570e45e8c44e9b1b4cac8db3a"
    ),
    "test/single/test_torch_elastic.py": (
        "d57232328772dfca9a721137bfa90e15931d9fe9d2f1380d69a54a7f6345ca92"
    ),
    "test/integration/test_elastic_torch.py": (
        "8c931a769d8b560e9700bcb44700429c48c10f13a4bf22bdaa7d4fdfb5c08f7c"
    ),
    "test/integration/elastic_common.py": (
        "d987474939cfbb00790524a1702fe1bb3e66c063bfa3947d0cf5dcef4c5a6906"
    ),
    "test/integration/data/elastic_torch_main.py": (
        "519be2d67402b30b6c55dc4c061d4778f8edf7a3652c3980ae611a732e9ae5d6"
    ),
    "test/utils/common.py": "9844d1041c1e26b34657273608a51a19a94c18e0c22f9aa7971ae78189119290",
}

_MUON = (
    "the test tries every optimizer of torch.optim on a network with biases; PyTorch 2.9 brought "
    "Muon, which takes matrices only and refuses them before Horovod is asked"
)
KNOWN_FAILURES: Mapping[str, str] = {
    "test_broadcast_state": _MUON,
    "test_broadcast_state_options": _MUON,
    "test_force_allreduce": _MUON,
}

# Each test starts Horovod anew. Its rendezvous sometimes keeps what ranks left there before (the
# end of one scope makes it forget who has left the others), and on a busy machine a rank then calls
# an address that is no more. So after each test ranks wait until the rendezvous is empty.
CONFTEST = """
import os, pathlib, time

def pytest_runtest_teardown(item):
    folder = pathlib.Path(os.environ["MEETING"])
    (folder / f"{item.name}.{os.environ['HOROVOD_RANK']}").touch()
    deadline = time.monotonic() + 60
    while not (folder / f"{item.name}.go").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
"""
TEST_LIMIT_S = 180
PART_LIMIT_S = 1800
POLL_S = 0.01
TAIL_CHARS = 3000
# A rank whose test failed leaves the other in an exchange; it must give up long before the limit.
STALL_WARNING_S, STALL_SHUTDOWN_S = 20, 60


@dataclass(frozen=True)
class Part:
    """Some of the tests, and how they are started."""

    file: str
    num_ranks: int


PARTS = (
    Part("test/parallel/test_torch.py", 2),
    Part("test/single/test_torch_elastic.py", 1),
    Part("test/integration/test_elastic_torch.py", 0),  # starts its ranks itself
)


@dataclass(frozen=True)
class Outcome:
    """What became of one part's tests; a test that failed on any rank has failed."""

    passed: frozenset[str]
    skipped: frozenset[str]
    failed: frozenset[str]


def main(arguments: Sequence[str]) -> int:
    """Run all parts; returns the exit code."""
    if len(arguments) > 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="horovod-suite-") as folder:
        try:
            checkout = Path(arguments[0]) if arguments else clone(Path(folder) / "checkout")
            tests = copy_of_tests(checkout, Path(folder) / "copy")
            outcomes = {part: run_twice_where_it_fails(part, tests) for part in PARTS}
        except RuntimeError as exc:
            sys.stderr.write(f"{exc}\n")
            return 2
    complaints = [
        complaint for part, outcome in outcomes.items() for complaint in judge(part, outcome)
    ]
    for part, outcome in outcomes.items():
        print(
            f"{part.file}: {len(outcome.passed)} passed, {len(outcome.skipped)} skipped, "
            f"{len(outcome.failed)} failed"
        )
    print("\n".join(complaints) or "every failure is a known one, with its reason in this file")
    return 1 if complaints else 0


def clone(folder: Path) -> Path:
    """Clone the release into a folder.

    Raises:
        RuntimeError: git could not.
    """
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", RELEASE, REPOSITORY]
    if subprocess.run([*command, str(folder)], stdin=subprocess.DEVNULL, check=False).returncode:
        raise RuntimeError(
            f"{REPOSITORY} could not be cloned. With a checkout of {RELEASE} from elsewhere: "
            "python -m tests.support.suite.horovod_suite CHECKOUT"
        )
    return folder


def copy_of_tests(checkout: Path, folder: Path) -> Path:
    """Copy the tests out of a checkout; returns the copy's folder.

    Raises:
        RuntimeError: a file is absent, or not that of the release.
    """
    for name, expected in DIGESTS.items():
        source, copy = checkout / name, folder / name
        if not source.is_file():
            raise RuntimeError(
                f"{source} is absent; {checkout} is no checkout of Horovod {RELEASE}"
            )
        seen = hashlib.sha256(source.read_bytes()).hexdigest()
        if seen != expected:
            raise RuntimeError(
                f"{source} has SHA-256 {seen[:12]}, expected {expected[:12]}: check out {RELEASE}"
            )
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    # Their helpers import `mock`, the package that the standard library took up long ago.
    (folder / "test/utils/mock.py").write_text("from unittest.mock import *\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test/parallel/conftest.py").write_text(CONFTEST)
    return folder


def run_twice_where_it_fails(part: Part, folder: Path) -> Outcome:
    """Run a part, and alone once more the tests that failed though they are not known to.

    Some of the elastic ones count on a second or two, which a busy machine does not keep.
    """
    first = run_part(part, folder)
    doubtful = first.failed - set(KNOWN_FAILURES)
    if not doubtful:
        return first
    print(f"{part.file}: once more, alone: {', '.join(sorted(doubtful))}")
    again = run_part(part, folder, doubtful)
    return replace(
        first,
        passed=first.passed | again.passed,
        failed=(first.failed - doubtful) | again.failed,
    )


def run_part(part: Part, folder: Path, chosen: Collection[str] = ()) -> Outcome:
    """Run one part's tests, or some chosen ones, on its ranks, to the end.

    Raises:
        RuntimeError: a rank ended without a report.
    """
    size = max(1, part.num_ranks)
    meeting = Path(tempfile.mkdtemp(prefix="meeting-", dir=folder))
    server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, 0)
    server.init(get_host_assignments([HostInfo(HOST_NAME, size)], size))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    ranks = [_start(part, meeting, rank, port, chosen) for rank in range(size)]
    deadline = time.monotonic() + PART_LIMIT_S
    try:
        while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < deadline:
            if any(code is not None and code < 0 for code in codes):
                break  # it crashed, so the others wait for it in vain
            _let_go_on(meeting, size, server)
            time.sleep(POLL_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        server.shutdown()
        server.server_close()
    for said in sorted(meeting.glob("*.log")):
        print(f"--- {part.file}, {said.stem}\n{said.read_text(errors='replace')[-TAIL_CHARS:]}")
    return read_reports([meeting / f"rank-{rank}.xml" for rank in range(size)])


def _let_go_on(meeting: Path, size: int, server: RendezvousHTTPServer) -> None:
    """Empty the rendezvous for every test that all ranks have ended, and tell them."""
    for first in meeting.glob("*.0"):
        go = first.with_suffix(".go")
        ended = all(first.with_suffix(f".{rank}").exists() for rank in range(size))
        if ended and not go.exists():
            server.cache.clear()
            server.finished_list.clear()
            go.touch()


def _start(
    part: Part, meeting: Path, rank: int, port: int, chosen: Collection[str]
) -> subprocess.Popen[bytes]:
    tests = meeting.parent / part.file
    identity = rank_variables(rank, part.num_ranks, port, STALL_WARNING_S, STALL_SHUTDOWN_S)
    environment = {
        **os.environ,
        **(identity if part.num_ranks else {}),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # its launcher looks there
        "PYTHONPATH": str(meeting.parent / "test/utils"),
        "OMP_NUM_THREADS": "1",
        "MEETING": str(meeting),
    }
    report = meeting / f"rank-{rank}.xml"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests.name),
        *(f"--timeout={TEST_LIMIT_S}", f"--junitxml={report}", "-k", " or ".join(chosen)),
    ]
    with (meeting / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=tests.parent, env=environment, stdout=log, stderr=log)


def read_reports(reports: Sequence[Path]) -> Outcome:
    """What became of the tests, from the JUnit reports of all ranks.

    Raises:
        RuntimeError: a rank ended without a report.
    """
    passed, skipped, failed = set[str](), set[str](), set[str]()
    for report in reports:
        if not report.exists():
            raise RuntimeError(f"{report.stem} ended without a report; see what it printed")
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            found = failed if kinds & {"failure", "error"} else passed
            (skipped if "skipped" in kinds else found).add(case.attrib["name"])
    return Outcome(
        passed=frozenset(passed - failed - skipped),
        skipped=frozenset(skipped - failed),
        failed=frozenset(failed),
    )


def judge(part: Part, outcome: Outcome) -> list[str]:
    """What is wrong: a failure that is not known, a known one that passed, or no test at all."""
    complaints = [
        f"{part.file}: {name} failed, and is not known to"
        for name in outcome.failed - set(KNOWN_FAILURES)
    ]
    complaints += [
        f"{part.file}: {name} passed; take it off the list of known failures"
        for name in outcome.passed & set(KNOWN_FAILURES)
    ]
    if not outcome.passed:
        complaints.append(f"{part.file}: no test passed")
    return sorted(complaints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
