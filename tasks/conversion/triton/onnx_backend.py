"""Runs inside Triton: an ONNX model on ONNX Runtime, where the server has no backend for it.

Triton's Python backend gives a whole dynamic batch as a list of requests of one shape each, beside
the rows. They are run in one call.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

PROVIDER = "CPUExecutionProvider"


class TritonPythonModel:
    """What Triton's Python backend looks for."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model file beside this one."""
        config = json.loads(args["model_config"])
        options = ort.SessionOptions()
        options.intra_op_num_threads = int(config["parameters"]["threads"]["string_value"])
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        folder = Path(args["model_repository"]) / args["model_version"]
        self._session = ort.InferenceSession(folder / "model.onnx", options, providers=[PROVIDER])
        self._inputs = [tensor["name"] for tensor in config["input"]]
        self._outputs = [tensor["name"] for tensor in config["output"]]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests with one call of the model."""
        found = pb_utils.get_input_tensor_by_name
        arrays = [[found(each, name).as_numpy() for name in self._inputs] for each in requests]
        together = [np.concatenate(parts) for parts in zip(*arrays, strict=True)]
        results = self._session.run(self._outputs, dict(zip(self._inputs, together, strict=True)))
        ends = np.cumsum([len(request[0]) for request in arrays])[:-1]
        parts = zip(*(np.split(result, ends) for result in results), strict=True)
        return [
            pb_utils.InferenceResponse(list(map(pb_utils.Tensor, self._outputs, answer)))
            for answer in parts
        ]
