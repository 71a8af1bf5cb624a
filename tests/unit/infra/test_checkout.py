"""An environment is whole or is made anew, and a foreign one is left alone."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from infra.provision.checkout import (
    Checkout,
    claim,
    exclusive,
    is_current,
    mark_complete,
    project_metadata,
    read_lock,
    wanted_digest,
    withdraw,
)
from infra.provision.commands import SetupError

PYPROJECT = '[project]\nname = "falaj"\n[tool.ruff]\nline-length = 100\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A checkout with small stand-ins for all files that decide, and a finished environment."""
    made = Checkout(tmp_path / "with space")
    entry = made.root / "infra" / "setup.py"
    for path in (made.requirements, made.weights_requirements, entry, made.horovod_backend):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path.name}\n")
    (made.root / "infra" / "provision").mkdir()
    (made.root / "infra" / "provision" / "code.py").write_text("x = 1\n")
    (made.root / "pyproject.toml").write_text(PYPROJECT)
    packages = made.venv / "lib" / "python3.11" / "site-packages"
    for name in ("torch-2.13.0+cpu", "numpy-2.4.6"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    made.python.parent.mkdir()
    made.python.symlink_to(sys.executable)
    made.state.mkdir()
    mark_complete(made, wanted_digest(made))
    return made


def site_packages(checkout: Checkout) -> Path:
    return checkout.venv / "lib" / "python3.11" / "site-packages"


def current(checkout: Checkout) -> bool:
    return is_current(checkout, wanted_digest(checkout))


@pytest.mark.parametrize(
    "name",
    [
        *("infra/requirements.lock", "infra/setup.py", "infra/provision/code.py"),
        *("infra/horovod/horovod_backend.py", "infra/weights/requirements.lock"),
    ],
)
def test_a_change_in_any_deciding_file_makes_it_stale(checkout: Checkout, name: str) -> None:
    path = checkout.root / name
    path.write_text(path.read_text() + "# changed\n")
    assert not current(checkout)


def test_project_metadata_counts_and_tool_settings_do_not(checkout: Checkout) -> None:
    path = checkout.root / "pyproject.toml"
    path.write_text(PYPROJECT.replace("100", "99"))
    assert current(checkout)
    path.write_text(PYPROJECT.replace("falaj", "other"))
    assert not current(checkout)
    assert project_metadata(PYPROJECT) != project_metadata('[build-system]\nrequires = ["x"]\n')


def test_a_removed_or_changed_package_makes_it_stale_and_an_added_one_does_not(
    checkout: Checkout,
) -> None:
    (site_packages(checkout) / "ipython-9.0.dist-info").mkdir()
    assert current(checkout)
    (site_packages(checkout) / "numpy-2.4.6.dist-info").rename(
        site_packages(checkout) / "numpy-3.0.dist-info"
    )
    assert not current(checkout)


def test_weights_that_were_removed_make_it_stale(checkout: Checkout) -> None:
    weights = checkout.weights / "words-1.0.dist-info"
    weights.mkdir(parents=True)
    mark_complete(checkout, wanted_digest(checkout))
    assert current(checkout)
    weights.rmdir()
    assert not current(checkout)


def test_a_moved_checkout_is_stale_because_scripts_name_their_interpreter(
    checkout: Checkout,
) -> None:
    moved = Checkout(checkout.root.rename(checkout.root.with_name("moved")))
    assert not current(moved)


def test_an_environment_whose_python_is_gone_is_stale(checkout: Checkout) -> None:
    checkout.python.unlink()
    assert not current(checkout)
    checkout.python.symlink_to("/nowhere/python3.11")
    assert not current(checkout)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"digest": 1}', "\x00"])
def test_a_broken_stamp_counts_as_none(checkout: Checkout, text: str) -> None:
    checkout.stamp.write_text(text)
    assert not current(checkout)


def test_withdrawing_takes_the_stamp_back_and_spares_setups_own_folder(
    checkout: Checkout,
) -> None:
    (checkout.state / "horovod-build.log").write_text("kept")
    (checkout.venv / "pyvenv.cfg").write_text("home = /usr\n")
    assert sorted(path.name for path in withdraw(checkout)) == ["bin", "lib", "pyvenv.cfg"]
    assert not current(checkout)
    assert [path.name for path in checkout.state.iterdir()] == ["horovod-build.log"]


def test_a_foreign_environment_is_left_alone(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.venv.mkdir()
    (checkout.venv / "pyvenv.cfg").write_text("home = /usr\n")
    with pytest.raises(SetupError, match="was not made by set-up, so it is left alone"):
        claim(checkout)
    assert [path.name for path in checkout.venv.iterdir()] == ["pyvenv.cfg"]


def test_an_empty_folder_or_none_is_claimed(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    claim(checkout)
    assert checkout.state.is_dir()
    claim(checkout)  # a second time changes nothing
    checkout.state.rmdir()
    claim(checkout)
    assert checkout.state.is_dir()


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
        "six==1.17.0 \\\n    --hash=sha256:cc\n\n# excluded:\n# torch\ntorch==2.13.0\n"
    )
    assert read_lock(text) == {
        "numpy": "numpy==2.4.6 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb",
        "six": "six==1.17.0 \\\n    --hash=sha256:cc",
        "torch": "torch==2.13.0",
    }


def test_a_link_in_the_environments_place_is_left_alone(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    checkout.venv.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SetupError, match="left alone"):
        claim(checkout)
    assert list((tmp_path / "elsewhere").iterdir()) == []
