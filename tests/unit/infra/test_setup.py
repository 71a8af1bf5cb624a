"""An environment is complete or is made anew, a foreign one is left alone; steps and failures."""

import os
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra import setup
from infra.provision.checkout import (
    Checkout,
    exclusive,
    horovod_wheel,
    kept_wheel,
    read_lock,
    wheel_key,
)
from infra.provision.machine import (
    Commands,
    Compiler,
    Progress,
    SetupError,
    Step,
    caller_environment,
    child_environment,
    find_compiler,
    link_locations,
    package_sources,
    require_machine,
)
from infra.setup import Installer, install_weights, main

PYPROJECT = '[project]\nname = "falaj"\n[tool.ruff]\nline-length = 100\n'
DECIDING = (
    *("infra/requirements.lock", "infra/setup.py", "infra/provision/code.py"),
    *("infra/horovod/horovod_backend.py", "infra/horovod/fixes.toml"),
    "infra/weights/requirements.lock",
)
SITE_PACKAGES = "lib/python3.11/site-packages"
WHEEL = "horovod-0.28.1+falaj3-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A checkout with small files in place of all that decide, and a finished environment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Checkout(tmp_path / "with space")
    for name in DECIDING:
        path = made.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path.name}\n")
    (made.root / "pyproject.toml").write_text(PYPROJECT)
    for name in ("torch-2.13.0+cpu", "numpy-2.4.6"):
        (made.venv / SITE_PACKAGES / f"{name}.dist-info").mkdir(parents=True)
    made.python.parent.mkdir()
    made.python.symlink_to(sys.executable)
    made.state.mkdir()
    made.mark_complete(made.wanted_digest())
    return made


def current(checkout: Checkout) -> bool:
    return checkout.is_current(checkout.wanted_digest())


@pytest.mark.parametrize("name", DECIDING)
def test_a_change_in_any_deciding_file_makes_it_stale(checkout: Checkout, name: str) -> None:
    (checkout.root / name).write_text("# changed\n")
    assert not current(checkout)


def test_project_metadata_counts_and_tool_settings_do_not(checkout: Checkout) -> None:
    path = checkout.root / "pyproject.toml"
    path.write_text(PYPROJECT.replace("100", "99"))
    assert current(checkout)
    path.write_text(PYPROJECT.replace("falaj", "other"))
    assert not current(checkout)


def test_a_removed_or_changed_package_makes_it_stale_and_an_added_one_does_not(
    checkout: Checkout,
) -> None:
    packages, weights = checkout.venv / SITE_PACKAGES, checkout.weights / "words-1.0.dist-info"
    (packages / "ipython-9.0.dist-info").mkdir()
    assert current(checkout)
    weights.mkdir(parents=True)
    checkout.mark_complete(checkout.wanted_digest())
    weights.rmdir()
    assert not current(checkout)
    checkout.mark_complete(checkout.wanted_digest())
    (packages / "numpy-2.4.6.dist-info").rename(packages / "numpy-3.0.dist-info")
    assert not current(checkout)


def test_a_moved_checkout_or_one_without_its_python_is_stale(checkout: Checkout) -> None:
    moved = Checkout(checkout.root.rename(checkout.root.with_name("moved")))
    assert not current(moved)
    moved.mark_complete(moved.wanted_digest())
    assert current(moved)
    moved.python.unlink()
    moved.python.symlink_to("/nowhere/python3.11")
    assert not current(moved)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"digest": 1}', "\x00"])
def test_a_broken_stamp_counts_as_none(checkout: Checkout, text: str) -> None:
    checkout.stamp.write_text(text)
    assert not current(checkout)


def test_withdrawing_takes_the_stamp_back_and_spares_setups_own_folder(checkout: Checkout) -> None:
    assert sorted(path.name for path in checkout.withdraw()) == ["bin", "lib"]
    assert not current(checkout)


def test_a_foreign_environment_or_link_is_left_alone_and_an_empty_folder_claimed(
    tmp_path: Path,
) -> None:
    checkout = Checkout(tmp_path)
    for _ in range(2):
        checkout.claim()
        assert checkout.state.is_dir()
    checkout.state.rmdir()
    (checkout.venv / "pyvenv.cfg").write_text("home = /usr\n")
    with pytest.raises(SetupError, match="was not made by set-up, so it is left alone"):
        checkout.claim()
    checkout.venv.rename(tmp_path / "elsewhere")
    checkout.venv.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="left alone"):
        checkout.claim()


def test_a_lock_is_held_by_one_and_passes_to_the_next(tmp_path: Path) -> None:
    waited = threading.Event()
    order: list[str] = []

    def second() -> None:
        with exclusive(tmp_path / "lock", waited.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(tmp_path / "lock", lambda: pytest.fail("nobody holds it")):
        thread.start()
        assert waited.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_lock_entries_keep_their_digests_and_lose_comments() -> None:
    text = (
        "# made by\nnumpy==2.4.6 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n    # via x\n"
        "\n# excluded:\n# torch\ntorch==2.13.0\n"
    )
    assert read_lock(text) == {
        "numpy": "numpy==2.4.6 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb",
        "torch": "torch==2.13.0",
    }


# Commands


def test_a_command_sees_its_environment_alone_and_a_failed_one_shows_its_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = Commands(tmp_path, {"PATH": os.environ["PATH"]}, tmp_path, held_locks=())
    seen = commands.run("the environment", ["env"])
    assert {line.partition("=")[0] for line in seen.splitlines()} <= {"PATH", "LC_CTYPE"}
    assert (tmp_path / "the-environment.log").read_text() == seen
    failing = ["sh", "-c", "for i in $(seq 99); do echo line $i; done; exit 3"]
    with pytest.raises(SetupError, match=r"(?s)build failed.*exit code 3.*line 99") as caught:
        commands.run("build", failing)
    assert "line 1\n" not in str(caught.value)
    with pytest.raises(SetupError, match="no-such-program"):
        commands.run("build", ["no-such-program"])
    progress = Progress(2)
    with progress.step("first") as step:
        step.outcome = "as planned"
    with pytest.raises(ValueError, match="broken"), progress.step("second"):
        raise ValueError("broken")
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[1/2] first ... as planned (")
    assert second.startswith("[2/2] second ... stopped (")


# The machine


def program(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_machine_without_tools_or_of_another_kind_is_refused_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match=r"g\+\+ gcc make.*Nothing was changed"):
        require_machine({"PATH": str(tmp_path)})
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(SetupError, match="linux on aarch64; the pinned packages"):
        require_machine({})


def test_the_named_compiler_comes_first_and_one_that_does_not_answer_is_passed_over(
    tmp_path: Path,
) -> None:
    program(tmp_path, "mine", 'echo "mine $* 1.0"')
    program(tmp_path, "c++", "exit 1")
    program(tmp_path, "g++", "echo g++ 12")
    named = find_compiler({"PATH": str(tmp_path), "CXX": "mine --fast"})
    assert named == Compiler("mine --fast", "mine --fast --version 1.0")
    assert find_compiler({"PATH": str(tmp_path)}) == Compiler("g++", "g++ 12")


LISTING = """\
:env:.find-links='/srv/wheels'
:env:.default-timeout='180'
:env:.user='1'
global.find-links='/ignored'
global.extra-index-url='\\nfile:///srv/a/simple\\nfile:///srv/b/simple'
global.target='/somewhere'
global.cert=''
install.index-url='file:///srv/index=1'
download.index-url='file:///srv/other'
no settings here
"""


def test_settings_about_places_are_taken_the_environments_first() -> None:
    assert package_sources(LISTING) == {
        "find-links": "/srv/wheels",
        "timeout": "180",
        "extra-index-url": "file:///srv/a/simple file:///srv/b/simple",
        "index-url": "file:///srv/index=1",
    }


def test_link_locations_are_absolute_and_missing_folders_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("near", "home/wheels"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    links = {"find-links": "near ~/wheels missing file:///srv/wheels"}
    near, wheels = str(tmp_path / "near"), str(tmp_path / "home" / "wheels")
    assert link_locations(links) == [near, wheels, "file:///srv/wheels"]


def test_what_could_change_the_result_does_not_reach_commands_and_the_machines_own_does() -> None:
    kept = ("HTTPS_PROXY", "SSL_CERT_FILE", "HOME", "CXX", "UV_CACHE_DIR")
    dropped = (
        *("PIP_USER", "PIP_TARGET", "UV_INDEX", "UV_NO_BINARY", "PYTHONPATH", "PYTHONHOME"),
        *("HOROVOD_GPU", "CMAKE_GENERATOR", "MAKEFLAGS", "MAKELEVEL", "CXXFLAGS", "VIRTUAL_ENV"),
    )
    assert caller_environment(dict.fromkeys((*kept, *dropped), "x")) == dict.fromkeys(kept, "x")


def test_pip_and_uv_are_told_the_same_places() -> None:
    sources = {"index-url": "file:///srv/i", "extra-index-url": "file:///srv/e", "cert": "/ca.pem"}
    caller = {"PATH": "/bin", "PIP_INDEX_URL": "file:///other", "UV_DEFAULT_INDEX": "file:///other"}
    seen = child_environment(caller, sources, Path("/co/.venv"))
    assert seen["PIP_INDEX_URL"] == seen["UV_DEFAULT_INDEX"] == "file:///srv/i"
    assert seen["PIP_EXTRA_INDEX_URL"] == seen["UV_INDEX"] == "file:///srv/e"
    assert seen["PIP_CERT"] == seen["SSL_CERT_FILE"] == "/ca.pem"
    assert seen["PATH"] == "/co/.venv/bin:/bin"
    assert (seen["PIP_CONFIG_FILE"], seen["UV_NO_CONFIG"]) == ("/dev/null", "1")


# Horovod's wheel


class Recorder(Commands):
    """Commands that are not run: keeps what was asked, and fails or answers as told."""

    asked: list[list[str]]

    def run(self, what: str, command: Sequence[str | Path]) -> str:
        Recorder.asked.append([str(word) for word in command])
        return self.answer(what)

    def answer(self, what: str) -> str:
        return ""


def build(commands: Recorder, what: str) -> str:
    """As the backend does: a wheel in the folder that it is given."""
    folder = Path(commands.environment["TMPDIR"])
    assert str(folder) == Recorder.asked[-1][-1]
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)
    return ""


def obtain(checkout: Checkout, key: str) -> Path:
    commands = Recorder(checkout.root, {}, checkout.root, held_locks=())
    return horovod_wheel(checkout, commands, key, Compiler("g++", "12"), Step())


def test_a_wheel_is_built_once_for_equal_parts_and_again_where_it_is_broken(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "asked", [], raising=False)
    monkeypatch.setattr(Recorder, "answer", build)
    key = wheel_key(checkout, "2.13.0+cpu", Compiler("g++", "12"))
    others = {
        wheel_key(checkout, "2.13.0+cu130", Compiler("g++", "12")),
        wheel_key(checkout, "2.13.0+cpu", Compiler("g++", "13")),
    }
    (checkout.horovod / "fixes.toml").write_text("# changed\n")
    others.add(wheel_key(checkout, "2.13.0+cpu", Compiler("g++", "12")))
    assert len({key, *others}) == 4

    wheel = obtain(checkout, key)
    assert wheel.parent == tmp_path / "cache" / "falaj" / "wheels" / key
    assert obtain(checkout, key) == wheel
    assert len(Recorder.asked) == 1
    whole = wheel.read_bytes()
    for broken in (whole[:-30], whole[:100] + b"\xff" + whole[101:]):
        wheel.write_bytes(broken)
        (wheel.parent / "build-killed" / "horovod").mkdir(parents=True)
        assert kept_wheel(wheel.parent) is None
        assert kept_wheel(obtain(checkout, key).parent) == wheel
        assert sorted(path.name for path in wheel.parent.iterdir()) == [WHEEL, "lock"]
    assert len(Recorder.asked) == 3
    monkeypatch.setattr(Recorder, "answer", failing(SetupError("horovod build failed")))
    with pytest.raises(SetupError):
        obtain(checkout, "other")
    assert [path.name for path in (wheel.parents[1] / "other").iterdir()] == ["lock"]


# Steps


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    monkeypatch.setattr(Recorder, "asked", [], raising=False)
    return Installer(Path("python"), Recorder(tmp_path, {}, tmp_path, ()), ("/srv/wheels",))


def failing(error: Exception) -> Callable[..., str]:
    def answer(*_: object) -> str:
        raise error

    return answer


def test_an_environment_that_was_not_finished_gets_no_stamp(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(checkout: Checkout, lock: int) -> None:
        checkout.withdraw()
        raise SetupError("no compiler")

    checkout.stamp.unlink()
    monkeypatch.setattr(setup, "make_environment", make)
    with pytest.raises(SetupError, match="no compiler"):
        setup.set_up(checkout)
    assert not checkout.stamp.exists()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (SetupError("no compiler"), 1, "set-up stopped: no compiler"),
        (OSError(28, "No space left on device", "/co/.venv"), 1, "/co/.venv: No space left"),
        (KeyboardInterrupt(), 130, "run again"),
    ],
)
def test_every_way_to_stop_ends_in_a_sentence(
    error: BaseException,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(checkout: Checkout) -> None:
        raise error

    monkeypatch.setattr(setup, "set_up", stop)
    assert main([]) == code
    assert words in capsys.readouterr().err


def test_failures_that_a_person_can_cure_say_how(
    installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Checkout(tmp_path)
    checkout.weights_requirements.parent.mkdir(parents=True)
    checkout.weights_requirements.write_text("words==1 \\\n    --hash=sha256:aa\n    # via x\n")
    assert install_weights(checkout, installer) == "words==1"
    (line,) = Recorder.asked
    assert {"--require-hashes", "--no-deps"} < set(line)
    assert line[line.index("--target") + 1] == str(checkout.venv / "weights")
    monkeypatch.setattr(Recorder, "answer", failing(SetupError("No solution found")))
    with pytest.raises(SetupError, match=r"the weights words==1 cannot be had.*PIP_FIND_LINKS"):
        install_weights(checkout, installer)
    with pytest.raises(SetupError, match=r"run `make lock`\. No solution found"):
        installer.check()
    monkeypatch.setattr(Recorder, "answer", lambda *_: "[X] PyTorch\n[ ] Gloo\n")
    with pytest.raises(SetupError, match=r"cannot use Gloo.*Delete /cache/key to have it built"):
        setup.check_horovod(checkout, installer.commands, Path("/cache/key/horovod.whl"))
