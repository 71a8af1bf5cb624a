"""A third hardware class is a few lines of YAML: no line of code knows its name."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from infra.bench.operation.prefect_api import PrefectApi
from infra.deploying import deploy
from infra.deploying.deployments import deployment_items, on_all_classes
from infra.deploying.file import read_prefect_file, read_use_cases
from infra.deploying.pools import pool_items
from tasks.contracts.hardware import FILE_NAME, read_classes
from tasks.control.config import RoutingConfig, StageRouting
from tasks.control.leases.devices import hardware_classes, read_cpu_flags
from tasks.kernel.errors import ConfigurationError, StageError
from tests.support.platform.deploys import REPO, on_server
from tests.support.platform.hardware_flows import of_class_flow, on_class_flow

pytestmark = pytest.mark.timeout(600)
OWN, FAR, FORMATS = "cpu-own", "cpu-far", ["onnx-fp32", "openvino-bf16"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A state folder with a class that this host is of, and one that no host is."""
    folder = tmp_path / "home"
    folder.mkdir()
    own = {
        "description": "Processors like those of this host.",
        "requires": {"cpu_flags": sorted(read_cpu_flags())[:2], "cores": 1},
        "formats": FORMATS,
    }
    far = {"description": "No host of today.", "requires": {"cores": 100_000}}
    (folder / FILE_NAME).write_text(yaml.safe_dump({OWN: own, FAR: far}))
    return folder


def one_deployment(folder: Path) -> Path:
    entry = {
        "name": "cpu",
        "description": "Tell the class.",
        "entrypoint": f"{of_class_flow.fn.__module__}.of_class_flow",
        "work_pool": {"name": "cpu", "work_queue_name": "retrain"},
        "tags": ["falaj"],
        "parameters": {"hardware": None},
        "enforce_parameter_schema": True,
        "schedules": [{"slug": "daily", "cron": "0 0 1 1 *"}],
    }
    file = folder / "prefect.yaml"
    content = {"name": "x", "prefect-version": "3", "pull": [], "deployments": [entry]}
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_class_of_ones_own_goes_from_the_workers_start_to_pool_route_lease_and_conversion(
    prefect_api: PrefectApi, home: Path
) -> None:
    assert hardware_classes(home) == ("cpu", OWN)
    classes, new = read_classes(home), (OWN, FAR)
    described = on_all_classes(read_prefect_file(one_deployment(home)), classes)
    deployed = [item for item in deployment_items(described, []) if item.name in new]
    assert [item.entry.schedules for item in deployed] == [(), ()]
    with prefect_api.in_process():
        for item in (*pool_items("process", None, {n: classes[n] for n in new}), *deployed):
            on_server(item.write)
        with prefect_api.worker(OWN, FALAJ_HOME=str(home)):
            seen, taken = on_class_flow(sent_to(OWN, 60))
        with pytest.raises(StageError, match=f"no worker of work pool '{FAR}' is online"):
            on_class_flow(sent_to(FAR))
        with pytest.raises(StageError, match=r"describe the class cpu-new in hardware\.yaml"):
            on_class_flow(sent_to("cpu-new"))
    assert taken == f"of-class/{OWN}"
    assert (seen.of_class, seen.converts_for) == (OWN, OWN)
    assert (seen.leased_cores, list(seen.formats)) == (1, FORMATS)


def sent_to(name: str, wait_s: float = 0) -> RoutingConfig:
    rule = StageRouting(hardware_class=name, wait_s=wait_s)
    return RoutingConfig(mode="deployments", conversion=rule)


def test_a_deploy_refuses_a_use_case_that_is_routed_to_a_class_that_does_not_exist(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [own] = read_use_cases([REPO])
    routing = {**own.config["routing"], "training": sent_to("gpu-new").conversion.model_dump()}
    other = replace(own, config={**own.config, "routing": routing})
    monkeypatch.setattr(deploy, "read_use_cases", lambda _: (other,))
    with pytest.raises(ConfigurationError, match=r"routing\.training .*'gpu-new'.*there are cpu"):
        deploy.make_plan([REPO])
