"""What an installation needs: its extras, names that stand once, a folder for an example."""

import os
from importlib import metadata
from pathlib import Path

import pytest

import falaj
from falaj.__main__ import main
from falaj.setup import EXAMPLES, copy_example
from flows.config import check_repository, read_pipeline_config
from tasks.kernel import extras
from tasks.kernel.errors import ConfigurationError
from tasks.kernel.extras import require_extras, require_horovod
from tests.support.host.processes import run_python


def test_importing_falaj_imports_nothing_else() -> None:
    program = "import sys, falaj; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    before = run_python("-c", program.replace(", falaj", ""), capture_output=True).stdout.split()
    after = run_python("-c", program, capture_output=True).stdout.split()
    assert set(after) - set(before) <= {"falaj", "typing", "_typing"}


@pytest.mark.parametrize("other", ["tasks.py", "flows/__init__.py"])
def test_a_second_package_of_a_name_is_refused_and_both_places_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    (tmp_path / other).parent.mkdir(exist_ok=True)
    (tmp_path / other).touch()
    home = str(Path(falaj.__file__).parents[1])
    assert falaj.find_double([home, str(tmp_path / "nowhere"), home]) is None
    for path in ([home, str(tmp_path)], [str(tmp_path), home]):
        found = falaj.find_double(path)
        assert found is not None
        name = other.removesuffix(".py").partition("/")[0]
        assert found == (name, f"{home}/{name}/__init__.py", str(tmp_path / other))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="two packages are named"):
        falaj.refuse_doubles()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{home}"}
    done = run_python("-m", "falaj", "--help", env=environment, capture_output=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("refused: two packages are named")
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_extra_is_named_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = ["pyyaml>=6", 'no-such-engine==1; extra == "convert"', 'pyyaml; extra == "train"']
    monkeypatch.setattr(extras, "requires", lambda _: lines)
    require_extras("train")
    with pytest.raises(ConfigurationError) as caught:
        require_extras("train", "convert")
    assert "no-such-engine: not installed" in str(caught.value)
    assert "pip install 'falaj[train,convert]'" in str(caught.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="falaj setup"):
        require_horovod()


def test_the_extras_that_commands_ask_for_exist() -> None:
    known = metadata.metadata("falaj").get_all("Provides-Extra") or []
    asked = {"train", "convert", "serve", "platform", "examples", "search"}
    assert asked <= set(known)
    require_extras(*asked)
    require_horovod()


def test_a_command_that_trains_asks_for_its_extras_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "requires", lambda _: ['no-such-torch; extra == "train"'])
    monkeypatch.setenv("FALAJ_HOME", str(tmp_path / "home"))
    for command in ("run", "train", "search", "compress", "setup", "demo"):
        assert main([command]) == 2
        assert "pip install 'falaj[train" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["flights", "traffic"])
def test_a_copied_example_is_a_whole_project_and_what_is_there_is_left_alone(
    tmp_path: Path, name: str
) -> None:
    copy_example(name, tmp_path / name)
    config = read_pipeline_config(tmp_path / name)
    check_repository(config, tmp_path / name)
    assert config.name == name
    assert not [p for p in (tmp_path / name).rglob("*") if p.is_symlink() or "pycache" in p.name]
    with pytest.raises(ConfigurationError, match="not empty; name another folder"):
        copy_example(name, tmp_path / name)
    assert EXAMPLES.parent == Path(falaj.__file__).parent
