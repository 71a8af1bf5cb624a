"""KServe's Python server around an ONNX file: python kserve_server.py MODEL_FILE HTTP_PORT."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import onnxruntime
from kserve import (  # type: ignore[import-not-found]
    InferOutput,
    InferRequest,
    InferResponse,
    Model,
    ModelServer,
)

_TYPES = {"INT32": np.int32, "FP32": np.float32}


class OnnxModel(Model):
    """One session on one thread."""

    def __init__(self, name: str, file: str) -> None:
        super().__init__(name)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(
            file, options, providers=["CPUExecutionProvider"]
        )
        self.ready = True

    def predict(self, payload: InferRequest, headers: Any = None, **kwargs: Any) -> InferResponse:
        """Scores of a request's rows."""
        inputs = {
            tensor.name: np.array(tensor.data, _TYPES[tensor.datatype]).reshape(tensor.shape)
            for tensor in payload.inputs
        }
        (score,) = self._session.run(None, inputs)
        output = InferOutput("score", list(score.shape), "FP32", score.tolist())
        return InferResponse(
            response_id=payload.id or "", model_name=self.name, infer_outputs=[output]
        )


if __name__ == "__main__":
    ModelServer(http_port=int(sys.argv[2]), enable_grpc=False, workers=1).start(
        [OnnxModel("tabular", sys.argv[1])]
    )
