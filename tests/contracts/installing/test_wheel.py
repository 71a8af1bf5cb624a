"""The wheel as a user has it: in an environment of its own, outside the checkout.

The packages that Falaj requires come from the environment of the tests by a `.pth` file. That they
can be resolved and downloaded is what `make setup` shows; here it is shown that the wheel is whole.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("falaj", "flows", "tasks", "serving", "infra")
LEFT_OUT = (
    *("bench", "cluster", "evidently", "kserve", "mlserver", "nannyml", "river"),
    *("serving_clients", "triton"),
)
PLACES = {"feature_repo": "falaj/examples", "prefect.yaml": "infra/deploying/prefect.yaml"}
# Programs, and modules for Triton's, Alembic's and Spark's own processes.
LEFT = ("__main__", ".horovod_backend", ".onnx_backend", ".env", ".spark_store")
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {packages}:
    package = importlib.import_module(name)
    assert package.__file__.startswith(sys.prefix), package.__file__
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        if not found.name.endswith({left}) and ".examples" not in found.name:
            importlib.import_module(found.name)
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution, built from a copy: a build leaves folders in its source."""
    source, made = tmp_path_factory.mktemp("source") / "falaj", tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "docs")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir")
    line = [sys.executable, "-m", "pip", "wheel", *options, str(made), str(source)]
    subprocess.run(line, check=True)
    [built] = made.iterdir()
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of an environment that has the wheel."""
    folder = tmp_path_factory.mktemp("installed") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    (packages / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    line = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    subprocess.run([*line, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    return folder / "bin"


def falaj(
    programs: Path, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The console script, as a user calls it in a folder of his own."""
    named = ("FALAJ_", "PREFECT_", "PYTHON")
    environment = {n: v for n, v in os.environ.items() if not n.startswith(named)} | variables
    return subprocess.run(
        [programs / "falaj", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )


def test_the_wheel_holds_all_that_runs_and_nothing_of_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA")))
    wanted = set()
    for top in (*PACKAGES, *PLACES):
        files = [ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*")
        for file in files:
            path = file.relative_to(ROOT)
            if file.is_file() and "__pycache__" not in path.parts and path.suffix != ".in":
                if path.parts[0] != "infra" or path.parts[1] not in LEFT_OUT:
                    wanted.add(str(path).replace(top, PLACES.get(top, top), 1))
    assert sorted(held ^ wanted) == []
    assert {name.partition("/")[0] for name in held} == set(PACKAGES)
    text = metadata.decode()
    assert "Requires-Python: <3.14,>=3.11" in text
    assert "License-Expression: Apache-2.0" in text
    assert "Requires-Dist: horovod" not in text


def test_every_module_of_an_installed_wheel_can_be_imported(
    installed: Path, tmp_path: Path
) -> None:
    program = IMPORT_ALL.format(packages=PACKAGES, left=LEFT)
    line = [str(installed / "python"), "-W", "ignore", "-c", program]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_outside_a_project_commands_say_what_to_do_and_change_nothing(
    installed: Path, tmp_path: Path
) -> None:
    assert "demo" in falaj(installed, tmp_path, "--help").stdout
    refused = falaj(installed, tmp_path, "status")
    assert refused.returncode == 2
    assert f"neither {tmp_path} nor a folder above it holds use_case.yaml" in refused.stderr
    assert "falaj init" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_project_of_its_own_keeps_its_state_beside_it(installed: Path, tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    line = "from falaj.setup import copy_example; from pathlib import Path; "
    line += "copy_example('traffic', Path('shop'))"
    subprocess.run([installed / "python", "-c", line], cwd=tmp_path, check=True)
    found = falaj(installed, shop / "sql", "status")
    assert found.returncode == 3, found.stderr  # no platform runs
    made = falaj(installed, shop / "sql", "keys", "create", "--subject", "x", "--role", "admin:*")
    assert made.returncode == 0, made.stderr
    assert (shop / ".falaj").is_dir()
    packages = next(installed.parent.glob("lib/python3*/site-packages"))
    assert not list(packages.glob("**/.falaj"))


def test_setup_finds_horovod_or_says_what_the_machine_lacks(
    installed: Path, tmp_path: Path
) -> None:
    lacking = falaj(installed, tmp_path, "setup", PATH=str(tmp_path))
    assert lacking.returncode == 2
    assert "g++" in lacking.stderr
    assert "C++ compiler" in lacking.stderr


@pytest.mark.timeout(900)
def test_the_demo_runs_the_whole_loop_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    done = falaj(installed, tmp_path, "demo", "--example", "traffic")
    assert done.returncode == 0, done.stdout + done.stderr
    project = tmp_path / "falaj-demo"
    reports = project / ".falaj" / "use_cases" / "traffic" / "reports" / "latest"
    assert f"{reports}/report.html" in done.stdout
    assert '"v0.1.0"' in (reports / "report.json").read_text()  # no commit of a checkout
    assert [path.name for path in tmp_path.iterdir()] == ["falaj-demo"]
    kept = falaj(installed, tmp_path, "demo", "--folder", str(installed))
    assert kept.returncode == 2
    assert "not empty" in kept.stderr
