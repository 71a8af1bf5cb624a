"""Images and pipelines: their files are sound; both images are built and run as they are meant to.

Images are built by buildah and run by podman with runc, as root, on a read-only root file system,
as a user who is nobody, with no network but a loopback of their own, and with no capability.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
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


def ran(*line: str | Path, limit_s: float = 900) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        line, check=False, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=limit_s
    )
    assert done.returncode == 0, f"{line}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


class Image:
    """One image, and a folder with the state and the project of its containers."""

    def __init__(self, target: str, folder: Path) -> None:
        self.name = f"localhost/falaj-{target}:test"
        # Podman asks for more open files and processes than a root without CAP_SYS_RESOURCE has.
        limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
        hard = {name: resource.getrlimit(limit)[1] for name, limit in limits.items()}
        self.line = [
            *("podman", "--runtime", "runc", "run", "--rm", "--network", "none", "--read-only"),
            *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp"),
            *(f"--ulimit={name}={number}:{number}" for name, number in hard.items()),
            *(
                "--volume",
                f"{folder / 'state'}:/var/lib/falaj",
                "--env",
                "FALAJ_FEATURE_REPO=/project",
            ),
            *("--volume", f"{folder / 'third'}:/project:ro"),
        ]

    def run(self, *words: str, options: tuple[str, ...] = (), limit_s: float = 900) -> str:
        """Run a command in a container of its own."""
        return ran(*self.line, *options, self.name, *words, limit_s=limit_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project that containers read, and a state folder that is theirs."""
    folder = tmp_path_factory.mktemp("images")
    third_use_case(folder)
    (folder / "state").mkdir(mode=0o700)
    os.chown(folder / "state", USER, USER)
    ran("infra/images/build", "--tag", "test", limit_s=1800)
    yield folder
    for target in ("serving", "training"):
        ran("buildah", "rmi", "--force", f"localhost/falaj-{target}:test")


@pytest.fixture(scope="module")
def training(folder: Path) -> Image:
    return Image("training", folder)


@pytest.fixture(scope="module")
def serving(folder: Path) -> Image:
    return Image("serving", folder)


@real
@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_loop_runs_in_the_training_image_and_the_serving_image_answers_with_its_model(
    training: Image, serving: Image, folder: Path
) -> None:
    assert "set-up: .venv is up to date" in (said := training.run("make", "run"))
    assert "promoted" in said
    assert {path.stat().st_uid for path in (folder / "state").rglob("*")} == {USER}
    container = serving.run("python", "-m", "serving", options=("--detach",)).strip()
    try:
        exec_line = ("podman", "--runtime", "runc", "exec", container, "python", "-c", ASK)
        [output] = json.loads(ran(*exec_line))["outputs"]
        assert output["shape"] == [2]
        assert 0 < output["data"][0] < 1
    finally:
        ran("podman", "--runtime", "runc", "stop", container)


@real
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_images_say_what_they_are_and_hold_no_builder_and_no_source_of_packages(
    training: Image, serving: Image
) -> None:
    tools = "for each in gcc g++ pip uv cmake git; do command -v $each; done; ls /etc/pip.conf"
    for image, title in ((training, "Falaj, training"), (serving, "Falaj, serving")):
        [about] = json.loads(ran("podman", "inspect", image.name))
        labels = {name.rpartition(".")[2]: text for name, text in about["Labels"].items()}
        assert (labels["title"], labels["licenses"]) == (title, "Apache-2.0")
        assert about["User"] == f"{USER}:{USER}"
        listed = set(image.run("cat", ".venv/packages.txt").splitlines())
        assert {line.partition("==")[0] for line in listed} > {"falaj", "torch", "onnxruntime"}
        assert image.run("sh", "-c", f"{{ {tools}; }} 2>/dev/null || true") == ""
        refused = "touch /opt/falaj/x 2>/dev/null || echo refused"
        assert image.run("sh", "-c", refused) == "refused\n"
        history = json.dumps(about["History"]) + json.dumps(about["Config"])
        assert not {"index", "PIP_", "find-links"} & {*history.split()}
