"""Horovod's wheel is built once for the same parts, and never taken for others or when broken."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.provision.checkout import Checkout
from infra.provision.commands import Commands, SetupError, Step
from infra.provision.horovod_wheel import horovod_wheel, kept_wheel, wheel_key
from infra.provision.machine import Compiler

COMPILER = Compiler("g++", "c++ 12.2")
KEY = wheel_key("2.13.0+cpu", COMPILER, "source")
WHEEL = "horovod-0.28.1+falaj3-cp311-cp311-linux_x86_64.whl"


def write_wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/__init__.py", "x = 1\n" * 1000)


class FakeBuild(Commands):
    """Stands in for the backend: writes a wheel into the folder it is given, or fails."""

    calls: int = 0
    fails: bool = False

    def run(self, what: str, command: Sequence[str | Path], step: Step) -> str:
        FakeBuild.calls += 1
        if FakeBuild.fails:
            raise SetupError("horovod build failed")
        assert Path(self.environment["TMPDIR"]) == command[-1]
        assert self.environment["CXX"] == "g++"
        write_wheel(Path(command[-1]) / WHEEL)
        return ""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(FakeBuild, "calls", 0)
    monkeypatch.setattr(FakeBuild, "fails", False)
    return Checkout(tmp_path / "checkout")


def obtain(checkout: Checkout, key: str = KEY) -> Path:
    commands = FakeBuild(checkout.root, {}, checkout.root, held_locks=())
    return horovod_wheel(checkout, commands, key, COMPILER, Step("Horovod"))


def test_pytorch_compiler_and_source_decide_which_wheel_it_is() -> None:
    other = Compiler("g++", "c++ 13")
    keys = {
        KEY,
        wheel_key("2.13.0+cu130", COMPILER, "source"),
        wheel_key("2.13.0+cpu", other, "source"),
        wheel_key("2.13.0+cpu", COMPILER, "source "),
    }
    assert len(keys) == 4
    assert wheel_key("2.13.0+cpu", COMPILER, "source") == KEY


def test_a_wheel_is_built_once_and_another_for_other_parts(
    checkout: Checkout, tmp_path: Path
) -> None:
    first = obtain(checkout)
    assert first.parent == tmp_path / "cache" / "falaj" / "wheels" / KEY
    assert obtain(checkout) == first
    assert FakeBuild.calls == 1
    assert obtain(checkout, "other") != first
    assert FakeBuild.calls == 2


@pytest.mark.parametrize("damage", ["cut off", "inside"])
def test_a_broken_wheel_is_built_again(checkout: Checkout, damage: str) -> None:
    wheel = obtain(checkout)
    content = bytearray(wheel.read_bytes())
    content[100] ^= 0xFF
    wheel.write_bytes(bytes(content) if damage == "inside" else wheel.read_bytes()[:-30])
    assert kept_wheel(wheel.parent) is None
    assert kept_wheel(obtain(checkout).parent) == wheel
    assert FakeBuild.calls == 2


def test_leftovers_of_a_killed_build_are_removed(checkout: Checkout) -> None:
    folder = obtain(checkout).parent
    (folder / WHEEL).unlink()
    (folder / "build-killed" / "horovod").mkdir(parents=True)
    obtain(checkout)
    assert sorted(path.name for path in folder.iterdir()) == [WHEEL, "lock"]


def test_a_failed_build_leaves_no_wheel_and_no_scratch(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBuild, "fails", True)
    with pytest.raises(SetupError):
        obtain(checkout)
    folder = tmp_path / "cache" / "falaj" / "wheels" / KEY
    assert [path.name for path in folder.iterdir()] == ["lock"]
