"""Asks a server with Triton's own clients, in an environment that has them.

    python triton_v2_client.py HTTP_ADDRESS GRPC_ADDRESS

Prints what they understood, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np


def inputs_of(client: Any, binary: bool | None) -> list[Any]:
    arrays = {
        "categorical": ("INT32", np.array([[1, 2], [3, 4]], np.int32)),
        "numeric": ("FP32", np.array([[1.5, np.nan, 3], [4, 5, 6]], np.float32)),
    }
    found = []
    for name, (datatype, array) in arrays.items():
        given = client.InferInput(name, list(array.shape), datatype)
        if binary is None:
            given.set_data_from_numpy(array)
        else:
            given.set_data_from_numpy(np.nan_to_num(array), binary_data=binary)
        found.append(given)
    return found


def by_http(address: str) -> dict[str, Any]:
    import tritonclient.http as http
    from tritonclient.utils import InferenceServerException

    with http.InferenceServerClient(address.removeprefix("http://")) as client:
        told: dict[str, Any] = {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready("sums", "1"),
            "server": client.get_server_metadata(),
            "metadata": client.get_model_metadata("sums"),
            "index": client.get_model_repository_index(),
        }
        for name, binary in (("json", False), ("binary", True)):
            outputs = [http.InferRequestedOutput("score", binary_data=binary)]
            answer = client.infer(
                "sums", inputs_of(http, binary), outputs=outputs, request_id=f"id-{name}"
            )
            told[name] = answer.as_numpy("score").tolist()
            told[f"{name} id"] = answer.get_response()["id"]
        waiting = [client.async_infer("sums", inputs_of(http, True)) for _ in range(20)]
        told["async"] = [one.get_result().as_numpy("score").tolist() for one in waiting]
        client.load_model("sums")
        client.unload_model("sums")
        told["unloaded"] = client.is_model_ready("sums")
        client.load_model("sums")
        try:
            client.infer("sums", inputs_of(http, True)[:1])
        except InferenceServerException as exc:
            told["refusal"] = [exc.status(), exc.message()]
    return told


def by_grpc(address: str) -> dict[str, Any]:
    import tritonclient.grpc as grpc
    from tritonclient.utils import InferenceServerException

    with grpc.InferenceServerClient(address) as client:
        told: dict[str, Any] = {
            "live": client.is_server_live(),
            "ready": client.is_server_ready(),
            "model_ready": client.is_model_ready("sums"),
            "server": client.get_server_metadata(as_json=True),
            "metadata": client.get_model_metadata("sums", as_json=True),
        }
        answer = client.infer("sums", inputs_of(grpc, None), request_id="id-grpc")
        told["raw"] = answer.as_numpy("score").tolist()
        told["id"] = answer.get_response().id
        keys = []
        for name, datatype, array in (
            ("tailnum", "BYTES", np.array([b"N1", b"N2"], np.object_)),
            ("day", "INT64", np.array([1, 2], np.int64)),
        ):
            given = grpc.InferInput(name, list(array.shape), datatype)
            given.set_data_from_numpy(array)
            keys.append(given)
        answer = client.infer("sums", keys)
        told["entities"] = answer.as_numpy("score").tolist()
        told["features"] = answer.get_response().parameters["features"].string_param
        for name, asked in (
            ("absent input", lambda: client.infer("sums", inputs_of(grpc, None)[:1])),
            ("unknown model", lambda: client.infer("other", inputs_of(grpc, None))),
            (
                "empty track",
                lambda: client.infer(
                    "sums", inputs_of(grpc, None), headers={"x-falaj-slot": "shadow"}
                ),
            ),
        ):
            try:
                asked()
            except InferenceServerException as exc:
                told[name] = [exc.status(), exc.message()]
    return told


if __name__ == "__main__":
    answers = {"http": by_http(sys.argv[1]), "grpc": by_grpc(sys.argv[2])}
    json.dump(answers, sys.stdout)
