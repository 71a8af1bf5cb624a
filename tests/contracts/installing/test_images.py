"""Images and pipelines: their files are sound; both images are built and run as they are meant to.

Images are built by buildah and run by podman with runc, as root, on a read-only root file system,
as a user who is nobody, with no network but a loopback of their own, and with no capability.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.kernel.settings import PROJECT_ROOT
from tests.support.data.use_cases import third_use_case

WORKFLOW, PIPELINE = ".github/workflows/ci.yml", ".gitlab-ci.yml"
SCHEMA = ("check-jsonschema", "--builtin-schema")
CHECKS = {
    "workflow": (*SCHEMA, "vendor.github-workflows", WORKFLOW),
    "limits of a workflow": (*SCHEMA, "custom.github-workflows-require-timeout", WORKFLOW),
    "rights and pins of a workflow": ("zizmor", "--offline", "--persona=pedantic", WORKFLOW),
    "pipeline": (*SCHEMA, "vendor.gitlab-ci", "--data-transform", "gitlab-ci", PIPELINE),
    "compose": (*SCHEMA, "vendor.compose-spec", "compose.yaml"),
    "images": ("hadolint", "infra/images/Containerfile"),
    "scripts": ("shellcheck", "infra/images/build", ".ci/run"),
}
USER = 10001
PROGRAMS = ("buildah", "mmdebstrap", "podman", "runc")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
real = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0,
    reason=f"images are built by root, and need {' '.join(PROGRAMS)}; "
    f"here the user is {os.geteuid()}, and these are missing: {' '.join(MISSING) or 'none'}",
)
CONTAINERS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
"""
"""Podman by itself asks for more than a root without CAP_SYS_RESOURCE may have."""
ASK = """
import json, time, urllib.request
from urllib.error import URLError
address = "http://127.0.0.1:8000/v2/models/weekly-rise"
for _ in range(240):
    try:
        described = json.load(urllib.request.urlopen(address))
        break
    except URLError:
        time.sleep(0.5)
inputs = [{"name": one["name"], "datatype": one["datatype"],
           "shape": [2, one["shape"][1]], "data": [0] * 2 * one["shape"][1]}
          for one in described["inputs"]]
body = json.dumps({"inputs": inputs}).encode()
print(urllib.request.urlopen(f"{address}/infer", body).read().decode())
"""


@pytest.mark.parametrize("line", CHECKS.values(), ids=CHECKS)
def test_definitions_of_pipelines_and_images_are_sound(line: tuple[str, ...]) -> None:
    program = Path(sys.executable).parent / line[0]
    done = subprocess.run(
        [program, *line[1:]], check=False, cwd=PROJECT_ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_pipeline_calls_what_people_call() -> None:
    for definition in (WORKFLOW, PIPELINE):
        assert '.ci/run ${PART:+--part "$PART"}' in (PROJECT_ROOT / definition).read_text()


def ran(*line: str | Path, limit_s: float = 900, **environment: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        line,
        check=False,
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{line}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Image:
    """One image; its containers read one project and have one state folder."""

    name: str
    folder: Path

    def podman(self, *words: str) -> str:
        """Call podman and return its output."""
        return ran("podman", *words, CONTAINERS_CONF=str(self.folder / "containers.conf"))

    def run(self, *words: str, detach: bool = False) -> str:
        """Run a command in a container of its own; give its output, or its name where detached."""
        shared = {"state": "/var/lib/falaj", "third": "/project:ro"}
        volumes = [f"--volume={self.folder / here}:{there}" for here, there in shared.items()]
        line = ["run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=all"]
        line += [*volumes, "--security-opt=no-new-privileges", "--env=FALAJ_FEATURE_REPO=/project"]
        return self.podman(*line, *["--detach"] * detach, self.name, *words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project that containers read, and a state folder that is theirs; images are built."""
    folder = tmp_path_factory.mktemp("images")
    third_use_case(folder)
    (folder / "state").mkdir(mode=0o700)
    os.chown(folder / "state", USER, USER)
    (folder / "containers.conf").write_text(CONTAINERS)
    ran("infra/images/build", "--tag", "test", limit_s=1800)
    yield folder
    for target in ("serving", "training"):
        ran("buildah", "rmi", "--force", f"localhost/falaj-{target}:test")


@pytest.fixture(scope="module")
def training(folder: Path) -> Image:
    return Image("localhost/falaj-training:test", folder)


@pytest.fixture(scope="module")
def serving(folder: Path) -> Image:
    return Image("localhost/falaj-serving:test", folder)


@real
@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_loop_runs_in_the_training_image_and_the_serving_image_answers_with_its_model(
    training: Image, serving: Image, folder: Path
) -> None:
    assert "set-up: .venv is up to date" in (said := training.run("make", "run"))
    assert "weekly-rise version 1 is the champion" in said
    assert {path.stat().st_uid for path in (folder / "state").rglob("*")} == {USER}
    container = serving.run(detach=True).strip()
    try:
        [output] = json.loads(serving.podman("exec", container, "python", "-c", ASK))["outputs"]
        assert output["shape"] == [2]
        assert 0 < output["data"][0] < 1
    finally:
        serving.podman("stop", container)


@real
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_images_say_what_they_are_and_hold_no_builder_and_no_source_of_packages(
    training: Image, serving: Image
) -> None:
    tools = {"training": "gcc g++ pip uv cmake git", "serving": "gcc g++ pip uv cmake git make"}
    for image, target in ((training, "training"), (serving, "serving")):
        [about] = json.loads(image.podman("inspect", image.name))
        labels = {name.rpartition(".")[2]: text for name, text in about["Labels"].items()}
        assert (labels["title"], labels["licenses"]) == (f"Falaj, {target}", "Apache-2.0")
        assert about["User"] == f"{USER}:{USER}"
        listed = image.run("cat", ".venv/packages.txt")
        assert {line.partition("==")[0] for line in listed.split()} > {"falaj", "torch", "feast"}
        found = f"for each in {tools[target]}; do command -v $each; done; ls /run/secrets"
        assert image.run("sh", "-c", f"{{ {found}; }} 2>/dev/null || true") == ""
        refused = "touch /opt/falaj/x 2>/dev/null || echo refused"
        assert image.run("sh", "-c", refused) == "refused\n"
        assert "PIP_" not in json.dumps([about["Config"], about["History"]])
