"""A champion of a real loop, served by the real process: answers, features, log, pages, an end."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import httpx
import numpy as np
import onnxruntime
import pyarrow.dataset as ds
import pytest
import yaml

from serving.config import SERVING_FILE
from tasks.contracts.serving import live_addresses
from tests.support.data.repository import days
from tests.support.host.processes import python, wait_until
from tests.support.platform.loops import NUM_DAYS, Loop, champion_of

pytestmark = pytest.mark.timeout(900)
MODEL = "flight-delay"
LIMIT_S = 120.0
CATEGORIES, NUMBERS = "categorical", "numeric"


@dataclass
class Served:
    """A serving process that answers, on the state folder of a loop."""

    loop: Loop
    addresses: dict[str, Any]

    @property
    def model(self) -> str:
        return f"{self.addresses['http']}/v2/models/{MODEL}"

    def infer(self, *inputs: dict[str, Any], request: str = "") -> httpx.Response:
        headers = {"x-request-id": request} if request else {}
        body = {"inputs": list(inputs)}
        return httpx.post(f"{self.model}/infer", json=body, headers=headers, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def served(loop: Loop) -> Iterator[Served]:
    moment = (days(0, NUM_DAYS).end + timedelta(minutes=30)).isoformat()
    chosen = {"entities": {"moment": moment}, "log": {"flush_s": 0.6, "masked": ["tailnum"]}}
    (loop.repository.path / SERVING_FILE).write_text(yaml.safe_dump(chosen))
    line = ["-m", "serving", "--home", str(loop.home)]
    line += ["--http-port", "0", "--grpc-port", "0", "--admin-port", "0"]
    environment = {**os.environ, "FALAJ_FEATURE_REPO": str(loop.repository.path)}
    log = loop.home / "serving.log"
    with (
        log.open("ab") as output,
        python(*line, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            wait_until(
                lambda: process.poll() is not None or bool(live_addresses(loop.home)),
                "the process serves",
                LIMIT_S,
            )
            (addresses,) = live_addresses(loop.home)
            assert addresses, log.read_text()
            yield Served(loop, dict(addresses))
        finally:
            process.terminate()


def tensors(served: Served, rows: int) -> tuple[dict[str, Any], ...]:
    described = httpx.get(served.model, timeout=LIMIT_S).json()
    widths = {spec["name"]: spec["shape"][1] for spec in described["inputs"]}
    drawn = np.random.default_rng(7)
    category = drawn.integers(0, 3, (rows, widths[CATEGORIES]))
    number = drawn.normal(size=(rows, widths[NUMBERS])).astype(np.float32)
    return tuple(
        {"name": name, "datatype": kind, "shape": list(values.shape), "data": values.tolist()}
        for name, kind, values in ((CATEGORIES, "INT32", category), (NUMBERS, "FP32", number))
    )


def logged(served: Served, request: str) -> list[dict[str, Any]]:
    folder = served.loop.home / "predictions" / f"model={MODEL}"
    if not any(not part.name.startswith(".") for part in folder.rglob("*.parquet")):
        return []  # the folder is there a moment before its first part
    rows = ds.dataset(folder, format="parquet").to_table(filter=ds.field("request_id") == request)
    return rows.to_pylist()


def test_the_champion_answers_as_its_file_does_in_the_runtime_alone(served: Served) -> None:
    answer = served.infer(*(sent := tensors(served, 5)))
    assert answer.status_code == 200, answer.text
    (file,) = champion_of(served.loop.home, MODEL).folder.glob("variants/onnx-fp32-*/model.onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    kinds = {"INT32": np.int32, "FP32": np.float32}
    (expected,) = session.run(
        None, {one["name"]: np.array(one["data"], kinds[one["datatype"]]) for one in sent}
    )
    found = answer.json()["outputs"][0]["data"]
    np.testing.assert_allclose(found, expected.ravel(), atol=1e-6)


def test_a_request_may_name_a_flight_by_its_keys_and_is_told_what_was_read(served: Served) -> None:
    keys = {"carrier": "UA", "origin": "EWR", "dest": "ORD", "tailnum": "N14228"}
    rest = {
        "weekday": 2, "departure_hour": 9, "minute_of_day": 540, "scheduled_minutes": 150,
        "arrival_minute_of_day": 690, "distance": 719, "departures_in_hour": 20,
    }  # fmt: skip
    texts = [{"name": k, "datatype": "BYTES", "shape": [1], "data": [v]} for k, v in keys.items()]
    numbers = [{"name": k, "datatype": "INT64", "shape": [1], "data": [v]} for k, v in rest.items()]
    refused = served.infer(*texts)
    assert refused.status_code == 400
    assert "the request lacks column" in refused.json()["error"]
    answer = served.infer(*texts, *numbers)
    assert answer.status_code == 200, answer.text
    told = answer.json()["parameters"]["features"]
    assert told["views"]["carrier_stats"]["state"] == ["fresh"]
    assert told["features"]["carrier_stats__landed_24h"][0] > 0
    assert 0 < answer.json()["outputs"][0]["data"][0] < 1


def test_every_answer_is_in_the_log_and_what_is_masked_is_not(served: Served) -> None:
    name = f"logged-{time.time_ns()}"
    answer = served.infer(*tensors(served, 3), request=name)
    scores, version = answer.json()["outputs"][0]["data"], answer.headers["x-falaj-version"]
    wait_until(lambda: len(logged(served, name)) == 3, "three rows are in the log", LIMIT_S)
    rows = sorted(logged(served, name), key=lambda row: row["request_row"])
    np.testing.assert_allclose([row["score"] for row in rows], scores, atol=1e-7)
    assert {(row["version"], row["slot"], row["error"]) for row in rows} == {
        (version, "stable", None)
    }
    parts = (served.loop.home / "predictions").rglob("*.parquet")
    assert not [part for part in parts if b"N14228" in part.read_bytes()]
