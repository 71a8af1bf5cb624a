"""What the machine lacks is named at once, with its cure, before anything is changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.provision import machine
from infra.provision.commands import SetupError
from infra.provision.machine import find_compiler, free_gigabytes, missing_tools, require_machine


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_an_empty_path_lacks_compilers_and_make(tmp_path: Path) -> None:
    missing = " ".join(missing_tools({"PATH": str(tmp_path)}, tmp_path))
    for words in ("a C++ compiler", "a C compiler", "make", "headers of Python", "g++"):
        assert words in missing


def test_the_error_names_all_that_is_missing_and_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SetupError) as caught:
        require_machine({"PATH": str(tmp_path)})
    assert "a C++ compiler (on Debian and Ubuntu the package g++); a C compiler" in str(
        caught.value
    )
    assert "Nothing was changed" in str(caught.value)


def test_the_named_compiler_comes_first_and_may_have_words_before_it(tmp_path: Path) -> None:
    for name in ("c++", "mine"):
        program(tmp_path, name, f'echo "{name} $* 1.0"')
    found = find_compiler({"PATH": str(tmp_path), "CXX": "mine --fast"})
    assert found == machine.Compiler("mine --fast", "mine --fast --version 1.0")
    assert find_compiler({"PATH": str(tmp_path)}) == machine.Compiler("c++", "c++ --version 1.0")


def test_a_compiler_that_does_not_answer_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path, "c++", "exit 1")
    program(tmp_path, "g++", "echo g++ 12")
    assert find_compiler({"PATH": str(tmp_path)}) == machine.Compiler("g++", "g++ 12")


@pytest.mark.parametrize(("system", "processor"), [("darwin", "arm64"), ("linux", "aarch64")])
def test_another_kind_of_machine_is_refused_with_the_reason(
    system: str, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: processor)
    with pytest.raises(SetupError, match=f"{system} on {processor}; the pinned packages"):
        require_machine({})


def test_free_space_is_told_in_gigabytes(tmp_path: Path) -> None:
    assert 0 < free_gigabytes(tmp_path) < 1e6
