"""Asks a server with Triton's own clients, in an environment that has them.

    python triton_v2_client.py HTTP_ADDRESS GRPC_ADDRESS

Prints what they understood, as JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

TENSORS = {
    "categorical": ("INT32", np.array([[1, 2], [3, 4]], np.int32)),
    "numeric": ("FP32", np.array([[1.5, 0, 3], [4, 5, 6]], np.float32)),
}
KEYS = {
    "tailnum": ("BYTES", np.array([b"N1", b"N2"], np.object_)),
    "day": ("INT64", np.array([1, 2], np.int64)),
}


def inputs_of(kind: Any, tensors: dict[str, Any] = TENSORS, **how: Any) -> list[Any]:
    found = []
    for name, (datatype, array) in tensors.items():
        given = kind.InferInput(name, list(array.shape), datatype)
        given.set_data_from_numpy(array, **how)
        found.append(given)
    return found


def of_server(client: Any) -> dict[str, Any]:
    """What both clients ask in the same way."""
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready() and client.is_model_ready("sums", "1"),
    }


def refusal(ask: Callable[[], Any]) -> Any:
    from tritonclient.utils import InferenceServerException

    try:
        return str(ask())
    except InferenceServerException as exc:
        return [exc.status(), exc.message()]


def by_http(address: str) -> dict[str, Any]:
    import tritonclient.http as http

    with http.InferenceServerClient(address.removeprefix("http://")) as client:
        told = of_server(client) | {
            "metadata": client.get_model_metadata("sums"),
            "index": client.get_model_repository_index(),
        }
        for name, binary in (("json", False), ("binary", True)):
            outputs = [http.InferRequestedOutput("score", binary_data=binary)]
            inputs = inputs_of(http, binary_data=binary)
            answer = client.infer("sums", inputs, outputs=outputs, request_id=f"id-{name}")
            told[name] = [answer.as_numpy("score").tolist(), answer.get_response()["id"]]
        waiting = [client.async_infer("sums", inputs_of(http)) for _ in range(20)]
        told["async"] = [one.get_result().as_numpy("score").tolist() for one in waiting]
        client.unload_model("sums")
        told["unloaded"] = client.is_model_ready("sums")
        client.load_model("sums")
        told["refusal"] = refusal(lambda: client.infer("sums", inputs_of(http)[:1]))
    return told


def by_grpc(address: str) -> dict[str, Any]:
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(address) as client:
        told = of_server(client) | {"metadata": client.get_model_metadata("sums", as_json=True)}
        answer = client.infer("sums", inputs_of(grpc), request_id="id-grpc")
        told["raw"] = [answer.as_numpy("score").tolist(), answer.get_response().id]
        answer = client.infer("sums", inputs_of(grpc, KEYS))
        features = answer.get_response().parameters["features"].string_param
        told["entities"] = [answer.as_numpy("score").tolist(), json.loads(features)]
        shadow = {"headers": {"x-falaj-slot": "shadow"}}
        for name, model, inputs, how in (
            ("absent input", "sums", inputs_of(grpc)[:1], {}),
            ("unknown model", "other", inputs_of(grpc), {}),
            ("empty track", "sums", inputs_of(grpc), shadow),
        ):
            asked = (model, inputs), how
            told[name] = refusal(lambda asked=asked: client.infer(*asked[0], **asked[1]))
    return told


if __name__ == "__main__":
    answers = {"http": by_http(sys.argv[1]), "grpc": by_grpc(sys.argv[2])}
    json.dump(answers, sys.stdout)
