"""Horovod's wheel is built once for the same parts, and never taken for others or when broken."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from infra.provision.checkout import Checkout
from infra.provision.commands import Commands, SetupError, Step
from infra.provision.horovod_wheel import (
    WheelParts,
    horovod_wheel,
    kept_wheel,
    wheel_parts,
)
from infra.provision.machine import Compiler

PARTS = WheelParts("2.13.0+cpu", "cpython-311-x86_64-linux-gnu", "x86_64", "c++ 12.2", "ab12")
COMPILER = Compiler("g++", "c++ 12.2")
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


def obtain(checkout: Checkout, parts: WheelParts = PARTS) -> Path:
    commands = FakeBuild(checkout.root, {}, checkout.root, held_locks=())
    return horovod_wheel(checkout, commands, parts, COMPILER, Step("Horovod"))


@pytest.mark.parametrize("name", [field.name for field in fields(WheelParts)])
def test_every_part_changes_the_key(name: str) -> None:
    assert replace(PARTS, **{name: "other"}).key != PARTS.key
    assert replace(PARTS).key == PARTS.key


def test_parts_name_this_machines_python_and_the_source_by_digest() -> None:
    parts = wheel_parts("2.13.0+cpu", COMPILER, "source")
    assert parts.torch == "2.13.0+cpu"
    assert parts.compiler == "c++ 12.2"
    assert "311" in parts.python_abi
    assert parts.backend == wheel_parts("x", COMPILER, "source").backend
    assert parts.backend != wheel_parts("x", COMPILER, "source ").backend


def test_a_second_call_takes_the_kept_wheel(checkout: Checkout, tmp_path: Path) -> None:
    first = obtain(checkout)
    assert first.parent == tmp_path / "cache" / "falaj" / "wheels" / PARTS.key
    assert "2.13.0+cpu" in (first.parent / "made-from.json").read_text()
    assert obtain(checkout) == first
    assert FakeBuild.calls == 1


def test_another_pytorch_gets_a_wheel_of_its_own(checkout: Checkout) -> None:
    assert obtain(checkout) != obtain(checkout, replace(PARTS, torch="2.13.0+cu130"))
    assert FakeBuild.calls == 2


def test_a_broken_wheel_is_built_again(checkout: Checkout) -> None:
    wheel = obtain(checkout)
    wheel.write_bytes(wheel.read_bytes()[:-30])
    assert kept_wheel(wheel.parent) is None
    assert kept_wheel(obtain(checkout).parent) == wheel
    assert FakeBuild.calls == 2


def test_a_wheel_with_a_damaged_file_inside_is_not_taken(tmp_path: Path) -> None:
    write_wheel(tmp_path / WHEEL)
    content = bytearray((tmp_path / WHEEL).read_bytes())
    content[100] ^= 0xFF
    (tmp_path / WHEEL).write_bytes(bytes(content))
    assert kept_wheel(tmp_path) is None


def test_leftovers_of_a_killed_build_are_removed(checkout: Checkout) -> None:
    folder = obtain(checkout).parent
    (folder / WHEEL).unlink()
    (folder / "build-killed" / "horovod").mkdir(parents=True)
    obtain(checkout)
    assert sorted(path.name for path in folder.iterdir()) == [WHEEL, "lock", "made-from.json"]


def test_a_failed_build_leaves_no_wheel_and_no_scratch(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeBuild, "fails", True)
    with pytest.raises(SetupError):
        obtain(checkout)
    folder = tmp_path / "cache" / "falaj" / "wheels" / PARTS.key
    assert [path.name for path in folder.iterdir()] == ["lock"]
