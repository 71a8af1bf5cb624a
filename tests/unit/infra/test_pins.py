"""The lock names one tested version of everything, with digests, within the project's ranges."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra import licences
from infra.provision.checkout import read_lock
from infra.setup import LOCK_END, TOOLS, TORCH

ROOT = Path(__file__).resolve().parents[3]
LOCK = read_lock((ROOT / "infra/requirements.lock").read_text())
VERSIONS = {
    name: entry.splitlines()[0].rstrip(" \\").partition("==")[2] for name, entry in LOCK.items()
}
# The first line of a script; where NVIDIA puts its toolkit unless told otherwise.
ALLOWED = {"/usr/bin/env", '/usr/local/cuda")'}
ENTRY = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*( \\\n    --hash=sha256:[0-9a-f]{64})+")


def fits(wanted: Requirement) -> bool:
    version = VERSIONS[canonicalize_name(wanted.name)]
    return wanted.specifier.contains(version, prereleases=True)


def test_every_entry_is_one_version_with_digests_but_pytorch_which_may_be_a_local_build() -> None:
    hashed = {name: entry for name, entry in LOCK.items() if name != TORCH}
    assert [entry for entry in hashed.values() if not ENTRY.fullmatch(entry)] == []
    assert len(hashed) > 200
    assert Requirement(LOCK[TORCH]).specifier.contains("2.13.0+cpu")
    assert (ROOT / "infra/requirements.lock").read_text().endswith(LOCK_END + LOCK[TORCH] + "\n")
    # NVML's binding is Python alone: it asks the driver, and says so where there is none.
    assert [name for name in LOCK if re.match("nvidia-(?!ml-py)|triton$|cuda", name)] == []


def test_what_the_project_asks_for_is_locked_within_its_ranges() -> None:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = tables["project"]["optional-dependencies"]
    [all_extras] = [Requirement(line).extras for line in extras["all"]]
    lists = [tables["project"]["dependencies"], *(extras[name] for name in all_extras)]
    lists += tables["dependency-groups"].values()
    asked = [Requirement(line) for lines in lists for line in lines if isinstance(line, str)]
    asked = [wanted for wanted in asked if wanted.name != "falaj"]  # an extra that has another
    assert [str(r) for r in asked if not fits(r)] == []
    assert extras.keys() - all_extras == {"all", "kubernetes", "redis"}
    pins: dict[str, set[str]] = {}
    for lines in extras.values():
        for each in map(Requirement, lines):
            pins.setdefault(each.name, set()).add(str(each.specifier))
    assert [name for name, said in pins.items() if len(said) > 1] == []  # said in two extras
    assert "horovod" not in pins  # no registry has it: `falaj setup` builds it


def test_what_builds_horovod_is_locked() -> None:
    build = tomllib.loads((ROOT / "infra/horovod/pyproject.toml").read_text())
    asked = build["build-system"]["requires"] + build["project"]["dependencies"] + [*TOOLS]
    assert [line for line in asked if not fits(Requirement(line))] == []


def test_weights_are_locked_with_digests_and_without_what_they_depend_on() -> None:
    folder = ROOT / "infra/weights"
    locked = read_lock((folder / "requirements.lock").read_text())
    lines = (folder / "requirements.in").read_text().splitlines()
    asked = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert [entry.split()[0] for entry in locked.values()] == asked
    assert [entry for entry in locked.values() if not ENTRY.fullmatch(entry)] == []
    assert locked.keys().isdisjoint(LOCK)


@pytest.mark.parametrize(
    "name",
    [
        *("Makefile", ".ci/run", "infra/setup.py"),
        *("infra/requirements.lock", "infra/horovod/horovod_backend.py", "pyproject.toml"),
        "infra/horovod/fixes.toml",
        *("infra/weights/requirements.in", "infra/weights/requirements.lock"),
        *sorted(f"infra/provision/{path.name}" for path in (ROOT / "infra/provision").glob("*.py")),
    ],
)
def test_no_registry_and_no_place_of_a_machine_is_written_down(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(r"https?://\S+|pypi\S*|/(?:root|home|opt|usr|work|srv|tmp)/\S*", text)
    assert [found for found in named if found not in ALLOWED] == []


def test_no_more_than_225_packages_are_required_and_the_licence_of_each_is_allowed() -> None:
    packages = licences.required()
    assert len(packages) <= 225  # decision 0177
    assert list(licences.faults(packages)) == []


def test_a_test_module_imports_no_other_and_every_helper_is_in_support() -> None:
    tests = ROOT / "tests"
    imports = re.compile(r"^\s*(?:from|import)\s+(?:tests\.(?!support)[\w.]*|\.[\w.]*)", re.M)
    common = ("test_", "conftest.py", "__init__.py")
    wrong = [
        path
        for path in tests.rglob("*.py")
        if imports.search(path.read_text())
        or (not path.name.startswith(common) and tests / "support" not in path.parents)
    ]
    assert wrong == []
