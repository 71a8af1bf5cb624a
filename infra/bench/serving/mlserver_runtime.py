"""The runtime with which MLServer serves an ONNX file; imported by MLServer in its environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
from mlserver import MLModel  # type: ignore[import-not-found]
from mlserver.types import (  # type: ignore[import-not-found]
    InferenceRequest,
    InferenceResponse,
    ResponseOutput,
)

_TYPES = {"INT32": np.int32, "FP32": np.float32}


class OnnxRuntime(MLModel):
    """One session on one thread."""

    async def load(self) -> bool:
        """Open the session."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session: Any = onnxruntime.InferenceSession(
            self.settings.parameters.uri, options, providers=["CPUExecutionProvider"]
        )
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Scores of a request's rows."""
        inputs = {
            tensor.name: np.array(tensor.data.root, _TYPES[tensor.datatype]).reshape(tensor.shape)
            for tensor in payload.inputs
        }
        (score,) = self._session.run(None, inputs)
        output = ResponseOutput(
            name="score", shape=list(score.shape), datatype="FP32", data=score.tolist()
        )
        return InferenceResponse(model_name=self.name, id=payload.id, outputs=[output])
