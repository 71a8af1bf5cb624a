"""Other servers around the bench's ONNX file; they import this in environments of their own.

KServe's is a program, `python peers.py MODEL_FILE HTTP_PORT`; MLServer imports `OnnxRuntime`.
"""

import importlib.util
import sys
from typing import Any

import numpy as np
import onnxruntime

_TYPES = {"INT32": np.int32, "FP32": np.float32}


def session(file: str) -> Any:
    """One session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def array(tensor: Any, data: Any) -> np.ndarray:
    """A tensor's numbers in its shape."""
    return np.array(data, _TYPES[tensor.datatype]).reshape(tensor.shape)


if importlib.util.find_spec("mlserver"):
    from mlserver import MLModel, types  # type: ignore[import-not-found]

    class OnnxRuntime(MLModel):
        """MLServer's runtime."""

        async def load(self) -> bool:
            """Open the session."""
            self._session = session(self.settings.parameters.uri)
            return True

        async def predict(self, payload: Any) -> Any:
            """Scores of a request's rows."""
            inputs = {each.name: array(each, each.data.root) for each in payload.inputs}
            (score,) = self._session.run(None, inputs)
            values = {"shape": list(score.shape), "datatype": "FP32", "data": score.tolist()}
            outputs = [types.ResponseOutput(name="score", **values)]
            return types.InferenceResponse(model_name=self.name, id=payload.id, outputs=outputs)


if importlib.util.find_spec("kserve"):
    from kserve import InferOutput, InferResponse, Model, ModelServer  # type: ignore[import-not-found]

    class OnnxModel(Model):
        """KServe's model."""

        def __init__(self, name: str, file: str) -> None:
            super().__init__(name)
            self._session, self.ready = session(file), True

        def predict(self, payload: Any, headers: Any = None, **kwargs: Any) -> Any:
            """Scores of a request's rows."""
            inputs = {each.name: array(each, each.data) for each in payload.inputs}
            (score,) = self._session.run(None, inputs)
            output = InferOutput("score", list(score.shape), "FP32", score.tolist())
            return InferResponse(
                response_id=payload.id or "", model_name=self.name, infer_outputs=[output]
            )

    if __name__ == "__main__":
        server = ModelServer(http_port=int(sys.argv[2]), enable_grpc=False, workers=1)
        server.start([OnnxModel("bench", sys.argv[1])])
