"""The steps of set-up, and what each failure shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from infra import setup
from infra.provision.checkout import Checkout
from infra.provision.commands import Commands, SetupError, Step
from infra.setup import Installer, install_weights, main, pytorch_note


class Recorder(Commands):
    """Commands that are not run: keeps what was asked, and fails or answers as told."""

    asked: list[list[str]]
    answer: Callable[[], str]

    def run(self, what: str, command: Sequence[str | Path], step: Step) -> str:
        Recorder.asked.append([str(word) for word in command])
        return Recorder.answer()


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    monkeypatch.setattr(Recorder, "asked", [], raising=False)
    monkeypatch.setattr(Recorder, "answer", str, raising=False)
    return Installer(Path("python"), Recorder(tmp_path, {}, tmp_path, ()), ("/srv/wheels",))


def failing(error: Exception) -> Callable[[], str]:
    def answer() -> str:
        raise error

    return answer


def test_uv_is_told_of_every_place_and_builds_with_pinned_tools_only(installer: Installer) -> None:
    installer.install("installing PyTorch", ["torch==2.13.0"], Step("x"))
    (line,) = Recorder.asked
    assert line[:3] == ["uv", "pip", "install"]
    assert line[line.index("--python") + 1] == "python"
    assert line[line.index("--find-links") + 1] == "/srv/wheels"
    assert line[-2:] == ["--no-build-isolation", "torch==2.13.0"]


def test_lock_entries_are_installed_with_their_digests_and_nothing_else(
    installer: Installer,
) -> None:
    arguments = installer.hashed(["six==1 \\\n    --hash=sha256:aa", "toml==2"])
    assert arguments[:2] == ["--require-hashes", "--no-deps"]
    assert Path(arguments[-1]).read_text() == "six==1 \\\n    --hash=sha256:aa\ntoml==2\n"


def test_packages_that_do_not_fit_name_the_command(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "answer", failing(SetupError("`falaj` requires `foo`")))
    with pytest.raises(SetupError, match=r"run `make lock`\. `falaj` requires `foo`"):
        installer.check(Step("x"))


def test_an_environment_that_was_not_finished_gets_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(checkout: Checkout, lock: int) -> None:
        raise SetupError("no compiler")

    monkeypatch.setattr(setup, "make_environment", make)
    monkeypatch.setattr(setup, "wanted_digest", lambda checkout: "digest")
    with pytest.raises(SetupError, match="no compiler"):
        setup.set_up(Checkout(tmp_path))
    assert not Checkout(tmp_path).stamp.exists()


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


def test_the_big_download_of_pytorch_is_announced(tmp_path: Path) -> None:
    assert "with CUDA" in pytorch_note("torch==2.13.0", [])
    assert "with CUDA" in pytorch_note("torch==2.13.0", [str(tmp_path)])
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert pytorch_note("torch==2.13.0", [str(tmp_path)]) == ""


def test_horovod_without_gloo_is_refused(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "[X] PyTorch\n[ ] Gloo\n"
    monkeypatch.setattr(Recorder, "answer", lambda: told)
    with pytest.raises(SetupError, match=r"cannot use Gloo.*Delete /cache/key to have it built"):
        setup.check_horovod(
            Checkout(Path("/co")), installer.commands, Path("/cache/key/horovod.whl"), Step("x")
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    made.weights_requirements.parent.mkdir(parents=True)
    made.weights_requirements.write_text("words==1 \\\n    --hash=sha256:aa\n    # via x\n")
    return made


def test_weights_go_into_a_folder_of_their_own_without_what_they_ask_for(
    installer: Installer, checkout: Checkout
) -> None:
    assert install_weights(checkout, installer, Step("x")) == "words==1"
    (line,) = Recorder.asked
    assert {"--require-hashes", "--no-deps"} < set(line)
    assert line[line.index("--target") + 1] == str(checkout.venv / "weights")


def test_weights_that_no_registry_has_name_the_way_out(
    installer: Installer, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "answer", failing(SetupError("No solution found")))
    with pytest.raises(SetupError, match=r"the weights words==1 cannot be had.*PIP_FIND_LINKS"):
        install_weights(checkout, installer, Step("x"))
