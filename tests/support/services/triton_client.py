"""Asks a Triton with its own HTTP client, in an environment that has it; see `triton_server`.

Questions and answers are JSON, on standard input and output.
"""

import json
import sys
from typing import Any

import numpy as np

TYPES = {"BYTES": "object", "FP32": "float32", "INT32": "int32", "INT64": "int64"}


def question(client: Any, http: Any, told: dict[str, Any]) -> Any:
    inputs = []
    for name, (datatype, values) in told["inputs"].items():
        array = np.array(values, dtype=TYPES[datatype])
        given = http.InferInput(name, list(array.shape), datatype)
        given.set_data_from_numpy(array)
        inputs.append(given)
    return client.async_infer(told["model"], inputs)


def main() -> None:
    import tritonclient.http as http
    from tritonclient.utils import InferenceServerException

    client = http.InferenceServerClient(sys.argv[1], concurrency=8)
    waiting = [(told, question(client, http, told)) for told in json.load(sys.stdin)]
    answers = []
    for told, request in waiting:
        try:
            result = request.get_result()
        except InferenceServerException as exc:
            answers.append({"error": str(exc)})
        else:
            array = result.as_numpy(told["output"])
            answers.append({"shape": array.shape, "values": array.ravel().tolist()})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
