"""Horovod's own tests are taken from its release alone, and judged against what is known."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from infra import horovod_suite
from infra.horovod_suite import (
    KNOWN_FAILURES,
    PARTS,
    Outcome,
    Part,
    copy_of_tests,
    judge,
    read_reports,
)

KNOWN = next(iter(KNOWN_FAILURES))
PART = PARTS[0]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose files are the ones that are expected."""
    folder, digests = tmp_path / "checkout", {}
    for name in horovod_suite.DIGESTS:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")
        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(horovod_suite, "DIGESTS", digests)
    return folder


def test_the_tests_are_copied_and_the_checkout_is_left_alone(
    checkout: Path, tmp_path: Path
) -> None:
    before = sorted(checkout.rglob("*"))
    folder = copy_of_tests(checkout, tmp_path / "copy")
    assert (folder / PART.file).read_text() == (checkout / PART.file).read_text()
    assert sorted(checkout.rglob("*")) == before


def test_another_release_is_refused(checkout: Path, tmp_path: Path) -> None:
    (checkout / PART.file).write_text("def test_nothing(): pass\n")
    with pytest.raises(RuntimeError, match=r"has SHA-256 .*: check out v0\.28\.1"):
        copy_of_tests(checkout, tmp_path / "copy")


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="is no checkout of Horovod"):
        copy_of_tests(tmp_path, tmp_path / "copy")
    assert horovod_suite.main([str(tmp_path)]) == 2


def test_a_repository_that_cannot_be_cloned_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(horovod_suite, "REPOSITORY", str(tmp_path / "none"))
    assert horovod_suite.main([]) == 2
    assert "python -m infra.horovod_suite CHECKOUT" in capfd.readouterr().err


def write_report(path: Path, **cases: str) -> Path:
    lines = [
        f'<testcase name="{name}">{f"<{kind}/>" if kind else ""}</testcase>'
        for name, kind in cases.items()
    ]
    path.write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>")
    return path


def test_a_test_that_failed_on_one_rank_has_failed(tmp_path: Path) -> None:
    outcome = read_reports(
        [
            write_report(tmp_path / "rank-0.xml", a="", b="", c="skipped", d="error"),
            write_report(tmp_path / "rank-1.xml", a="", b="failure", c="skipped", d=""),
        ]
    )
    assert outcome == Outcome(frozenset("a"), frozenset("c"), frozenset("bd"))


def test_a_rank_that_crashed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank-0 ended without a report"):
        read_reports([tmp_path / "rank-0.xml"])


@pytest.mark.parametrize(
    ("passed", "failed", "complaint"),
    [
        ({"a"}, {KNOWN}, None),
        ({"a"}, {"b"}, "b failed, and is not known to"),
        ({"a", KNOWN}, set(), f"{KNOWN} passed; take it off the list"),
        (set(), set(), "no test passed"),
    ],
)
def test_only_known_failures_are_forgiven(
    passed: set[str], failed: set[str], complaint: str | None
) -> None:
    complaints = judge(PART, Outcome(frozenset(passed), frozenset(), frozenset(failed)))
    assert len(complaints) == (complaint is not None)
    assert complaint is None or complaint in complaints[0]


@pytest.mark.parametrize("passes_alone", [True, False])
def test_what_fails_unexpectedly_is_run_once_more_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, passes_alone: bool
) -> None:
    asked: list[frozenset[str]] = []

    def run_part(part: Part, folder: Path, chosen: frozenset[str] = frozenset()) -> Outcome:
        asked.append(chosen)
        if not chosen:
            return Outcome(frozenset("a"), frozenset(), frozenset({"slow", KNOWN}))
        again = (frozenset(), chosen) if not passes_alone else (chosen, frozenset())
        return Outcome(again[0], frozenset(), again[1])

    monkeypatch.setattr(horovod_suite, "run_part", run_part)
    outcome = horovod_suite.run_twice_where_it_fails(PART, tmp_path)
    assert asked == [frozenset(), frozenset({"slow"})]
    assert bool(judge(PART, outcome)) != passes_alone
    assert KNOWN in outcome.failed
