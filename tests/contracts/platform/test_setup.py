"""Set-up as people and CI call it: through make, from a checkout whose path has a space."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from infra.provision.checkout import Checkout

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("triton", "serving-clients")
"""Have environments of their own, which `make test-slow` makes."""
ENVIRONMENTS = (*TOOLS, "mlserver", "kserve", "evidently", "nannyml", "river")
"""With those of the servers that `make bench` measures beside its own."""


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A copy of what set-up needs, without an environment."""
    made = Checkout(tmp_path / "a checkout")
    made.root.mkdir()
    shutil.copytree(
        ROOT / "infra", made.root / "infra", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, made.root / name)
    return made


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH: a Python 3.11 and what make's lines use, but no compiler."""
    folder = tmp_path / "tools"
    program(folder / "python3.11", f'exec {shlex.quote(sys.executable)} "$@"')
    for name in ("make", "sh", "awk", "rm", "env"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


def finish(checkout: Checkout) -> None:
    """Give the copy an environment that counts as finished, and whose Python tells its calls."""
    checkout.state.mkdir(parents=True)
    program(
        checkout.python,
        '[ "$1" = -I ] && exit; echo "called: $*"; echo "PYTHONPATH=$PYTHONPATH"; pwd',
    )
    program(checkout.venv / "bin" / "lint-imports", 'echo "called: lint-imports"')
    checkout.mark_complete(checkout.wanted_digest())
    for tool in ENVIRONMENTS:
        (checkout.root / f".venv-{tool}").mkdir()
        (checkout.root / f".venv-{tool}" / "complete").touch()


def make(
    checkout: Checkout, path: Path, *arguments: str, extra: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Call make from another folder, as CI would."""
    environment = {"PATH": str(path), "HOME": str(path.parent), **(extra or {})}
    return called("make", "-C", checkout.root, "--no-print-directory", *arguments, **environment)


def called(
    *command: str | Path, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Call a program as CI would: no terminal, no input, little environment."""
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={"CI": "true", **environment},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("command", "called"),
    [
        (("run",), "called: -m falaj run"),
        (
            ("test", "PYTEST_ARGS=tests/unit -x"),
            "called: -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/unit -x",
        ),
        (("bench",), "called: -m infra.bench"),
    ],
)
def test_commands_leave_a_finished_environment_as_it_is_and_run_in_the_checkout(
    checkout: Checkout, tools: Path, command: tuple[str, ...], called: str
) -> None:
    finish(checkout)
    before = sorted(checkout.venv.rglob("*"))
    caller = {"PYTHONPATH": "/elsewhere", "PYTHONHOME": "/elsewhere", "PYTHONWARNINGS": "error"}
    done = make(checkout, tools, *command, extra=caller)
    first, *rest = done.stdout.splitlines()
    assert first == "set-up: .venv is up to date"
    assert rest[:3] == [called, "PYTHONPATH=", str(checkout.root)]
    assert sorted(checkout.venv.rglob("*")) == before


def test_slow_tests_run_where_what_they_need_cannot_be_had(checkout: Checkout, tools: Path) -> None:
    finish(checkout)
    for tool in TOOLS:
        (checkout.root / f".venv-{tool}" / "complete").unlink()
    done = make(checkout, tools, "test-slow", "PART=3", "PROGRAMS=nowhere:a-package")
    assert "--group 3" in done.stdout
    assert "could not install a-package;" in done.stdout
    for tool in TOOLS:
        assert f"no .venv-{tool}: its tests will be skipped" in done.stdout
        refused = make(checkout, tools, f"test-{tool}")
        assert refused.returncode != 0
        assert "called: -m pytest" not in refused.stdout


def ci(checkout: Checkout, tools: Path, *options: str) -> subprocess.CompletedProcess[str]:
    shutil.copytree(ROOT / ".ci", checkout.root / ".ci")
    for name in ("bash", "dirname", "date", "sleep"):
        (tools / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(tools), "CDPATH": str(checkout.root.parent)}
    return called(tools / "bash", ".ci/run", *options, folder=checkout.root, **environment)


def test_ci_runs_the_quick_tests_and_a_part_of_the_slow_ones(
    checkout: Checkout, tools: Path
) -> None:
    finish(checkout)
    done = ci(checkout, tools, "--part", "5")
    assert done.returncode == 0, done.stderr
    called = [line for line in done.stdout.splitlines() if line.startswith("called: ")]
    kinds = ("ruff check", "ruff format", "mypy", "infra.budget", "lint-imports")
    kinds += ("pytest -n 2", "--group 5")
    assert len(called) == len(kinds)
    assert all(kind in line for kind, line in zip(kinds, called, strict=True)), called
    assert "unstable" not in done.stdout
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize(("first_only", "code"), [(True, 0), (False, 2)])
def test_ci_runs_what_failed_again_alone_and_names_it(
    checkout: Checkout, tools: Path, first_only: bool, code: int
) -> None:
    finish(checkout)
    again = "*last-failed*) exit 0;; " if first_only else ""
    program(
        checkout.python,
        f'[ "$1" = -I ] && exit; echo "called: $*"; '
        f'case "$*" in {again}*thorough*) exit 0;; *pytest*) exit 1;; esac',
    )
    done = ci(checkout, tools)
    assert done.returncode == code, done.stdout + done.stderr
    assert "make test: failed; what failed runs again, alone" in done.stdout
    assert ("unstable, passed when run again alone: make test" in done.stdout) == first_only


def test_a_machine_without_python_3_11_is_told_so(checkout: Checkout, tools: Path) -> None:
    (tools / "python3.11").unlink()
    program(tools / "python3", "exit 1")  # as Python 3.12 answers the question for its version
    done = make(checkout, tools, "run")
    assert done.returncode != 0
    assert "set-up needs Python 3.11, and none of these is one: python3.11 python3" in done.stderr
    assert not checkout.venv.exists()


def test_horovod_is_built_once_and_a_machine_without_a_compiler_is_told_what_to_install(
    tmp_path: Path,
) -> None:
    """`falaj setup`, which an installation from a wheel has in place of make."""
    variables = {"HOME": str(Path.home()), "FALAJ_HOME": str(tmp_path)}
    command = (sys.executable, "-m", "falaj", "setup")
    done = called(*command, folder=ROOT, PATH=os.environ["PATH"], **variables)
    assert done.returncode == 0, done.stderr
    assert "PyTorch 2.13.0" in done.stdout
    assert "already here" in done.stdout
    refused = called(*command, folder=ROOT, PATH=str(tmp_path), **variables)
    assert refused.returncode == 2
    assert "a C++ compiler; this machine lacks" in refused.stderr
    assert "g++ gcc make" in refused.stderr


def test_clean_removes_environments_and_state_and_only_when_told(
    checkout: Checkout, tools: Path
) -> None:
    finish(checkout)
    state = checkout.root / ".falaj" / "artifacts"
    state.mkdir(parents=True)
    refused = make(checkout, tools, "clean")
    assert "Nothing was removed." in refused.stdout
    assert state.exists()
    before = {path.name for path in checkout.root.iterdir()}
    done = make(checkout, tools, "clean", "YES=1")
    assert f"{checkout.root}/.falaj" in done.stdout
    assert before - {path.name for path in checkout.root.iterdir()} == {
        ".venv",
        ".falaj",
        *(f".venv-{tool}" for tool in ENVIRONMENTS),
    }
