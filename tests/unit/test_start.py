"""What a module loads when it is imported: tasks nothing heavy, plain modules no Prefect."""

import pytest

from tests.support.host.processes import run_python

ROWS = "torch sklearn pyarrow.dataset matplotlib"
HEAVY = {
    "flows.feature_refresh": "feast torch pandas",
    "flows.pipeline": "feast torch pandas sklearn mlflow",
    "tasks.evaluation.task": ROWS,
    "tasks.conversion.task": "torch onnx onnxruntime openvino nncf sklearn",
    "tasks.validation.task": "great_expectations duckdb",
    "tasks.evaluation.drift.compare": "torch",
    "tasks.validation.runner": "prefect",
    "tasks.conversion.convert": "prefect",
    "tasks.training.launch.launcher": "torch pandas",
    "tasks.training.search.trial": "prefect optuna",
    "tasks.validation.suites": "great_expectations prefect",
    "infra.platform.services": "prefect",
}


@pytest.mark.parametrize("module", HEAVY)
def test_a_module_imports_no_more_than_it_needs(module: str) -> None:
    heavy = set(HEAVY[module].split())
    run_python("-c", f"import sys, {module}; sys.exit({heavy} & set(sys.modules) or 0)", check=True)
