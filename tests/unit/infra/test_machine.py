"""What set-up takes from its caller: tools, where packages come from, and an environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.provision import machine
from infra.provision.commands import SetupError
from infra.provision.machine import (
    cache_folder,
    caller_environment,
    child_environment,
    find_compiler,
    link_locations,
    package_sources,
    require_machine,
)


def program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


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


LISTING = """\
:env:.find-links='/srv/wheels'
:env:.default-timeout='180'
:env:.user='1'
global.find-links='/ignored'
global.extra-index-url='\\nfile:///srv/a/simple\\nfile:///srv/b/simple'
global.target='/somewhere'
install.index-url='file:///srv/index=1'
download.index-url='file:///srv/other'
"""


def test_environment_overrules_install_section_which_overrules_global() -> None:
    listing = "install.cert='b'\n:env:.cert='c'\nglobal.cert='a'\n"
    assert package_sources(listing) == {"cert": "c"}
    assert package_sources("install.cert='b'\nglobal.cert='a'\n") == {"cert": "b"}


def test_only_settings_about_places_are_taken_and_lists_become_one_line() -> None:
    assert package_sources(LISTING) == {
        "find-links": "/srv/wheels",
        "timeout": "180",
        "extra-index-url": "file:///srv/a/simple file:///srv/b/simple",
        "index-url": "file:///srv/index=1",
    }


@pytest.mark.parametrize("listing", ["", "\n", "global.cert=''\n", "no settings here"])
def test_a_pip_without_settings_has_no_sources(listing: str) -> None:
    assert package_sources(listing) == {}


def test_link_locations_are_absolute_and_missing_folders_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "near").mkdir()
    (tmp_path / "home" / "wheels").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    links = {"find-links": "near ~/wheels missing file:///srv/wheels"}
    assert link_locations(links) == [
        str(tmp_path / "near"),
        str(tmp_path / "home" / "wheels"),
        "file:///srv/wheels",
    ]
    assert link_locations({}) == []


@pytest.mark.parametrize(
    "name",
    [
        *("PIP_USER", "PIP_TARGET", "PIP_REQUIRE_VIRTUALENV", "UV_INDEX", "UV_NO_BINARY"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE"),
        *("HOROVOD_GPU", "CMAKE_GENERATOR", "MAKEFLAGS", "MAKELEVEL", "CXXFLAGS", "VIRTUAL_ENV"),
    ],
)
def test_settings_that_could_change_the_result_do_not_reach_commands(name: str) -> None:
    assert name not in caller_environment({name: "1", "PATH": "/bin"})


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "SSL_CERT_FILE", "HOME", "CXX", "UV_CACHE_DIR"])
def test_settings_of_the_machine_do_reach_commands(name: str) -> None:
    assert caller_environment({name: "x"}) == {name: "x"}


def test_pip_and_uv_are_told_the_same_places() -> None:
    sources = {"index-url": "file:///srv/i", "extra-index-url": "file:///srv/e", "cert": "/ca.pem"}
    caller = {"PATH": "/bin", "PIP_INDEX_URL": "file:///other", "UV_DEFAULT_INDEX": "file:///other"}
    seen = child_environment(caller, sources, Path("/co/.venv"))
    assert seen["PIP_INDEX_URL"] == seen["UV_DEFAULT_INDEX"] == "file:///srv/i"
    assert seen["PIP_EXTRA_INDEX_URL"] == seen["UV_INDEX"] == "file:///srv/e"
    assert seen["PIP_CERT"] == seen["SSL_CERT_FILE"] == "/ca.pem"
    assert seen["PATH"] == "/co/.venv/bin:/bin"


def test_configuration_files_are_not_read_a_second_time() -> None:
    seen = child_environment({}, {}, Path("/co/.venv"))
    assert seen["PIP_CONFIG_FILE"] == "/dev/null"
    assert seen["UV_NO_CONFIG"] == "1"


@pytest.mark.parametrize("named", ["", "relative/cache"])
def test_the_cache_is_under_home_when_none_is_named(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert cache_folder() == tmp_path / ".cache" / "falaj"


def test_a_cache_that_cannot_be_written_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    with pytest.raises(SetupError, match="Set XDG_CACHE_HOME to a folder that can"):
        cache_folder()
