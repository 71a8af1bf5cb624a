"""A serving process around one ONNX file, to measure the protocol and the engine in front of it.

python -m infra.bench.serving.onnx_server MODEL_FILE STATE_FOLDER PORT [SECURITY_FILE]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import uvloop

from serving.assembly import Components, serve
from serving.config import ServedModel, ServingConfig, checked_config
from serving.engine.engine import ModelEngine
from serving.engine.versions import Backend, LoadedVersion, VersionKey
from serving.observability.metrics import Counting
from serving.security.config import read_security
from serving.security.guard import SecurityGuard
from serving.security.tls import RenewingTls, only_tls_1_3
from tasks.contracts.conversion import MOST_ROWS, Signature

MODEL = "tabular"
CATEGORICAL, NUMERIC = 7, 72

SIGNATURE = Signature.model_validate(
    {
        "inputs": [
            {"name": "categorical", "dtype": "int32", "shape": ("batch", CATEGORICAL)},
            {"name": "numeric", "dtype": "float32", "shape": ("batch", NUMERIC)},
        ],
        "output": {"name": "score", "dtype": "float32", "shape": ("batch",)},
        "largest": {"batch": MOST_ROWS},
    }
)
PROBE = {
    "categorical": np.zeros((1, CATEGORICAL), np.int32),
    "numeric": np.zeros((1, NUMERIC), np.float32),
}


def open_session(file: Path) -> onnxruntime.InferenceSession:
    """A session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class OneFile:
    """A catalogue of one version, whose answers are those of an ONNX file."""

    file: Path

    def by_alias(self, model: str, alias: str) -> VersionKey | None:
        """The version, whatever it is asked for."""
        return VersionKey(model, "1")

    def by_number(self, model: str, version: str) -> VersionKey:
        """The same."""
        return VersionKey(model, "1")

    def open(self, key: VersionKey) -> LoadedVersion:
        """Open the session."""
        session = open_session(self.file)
        backend = Backend(
            hardware="cpu",
            variant="onnx-fp32",
            platform="onnxruntime_onnx",
            score=lambda arrays: session.run(None, arrays)[0],
            probe=PROBE,
        )
        backend.measure([backend.probe])
        return LoadedVersion(key, SIGNATURE, (backend,))

    def has_changed(self) -> bool:
        """It never does."""
        return False


def main(file: str, home: str, port: str, security: str = "") -> None:
    """Serve until the process is ended."""
    off = {"http": {"port": int(port)}, "grpc": {"enabled": False}, "admin": {"port": 0}}

    def components_of(config: ServingConfig, home: Path) -> Components:
        models = (ServedModel(name=MODEL),)
        engine = ModelEngine(config.engine, models, OneFile(Path(file)))
        counting = Counting(lambda model: model == MODEL)
        engine.observers.append(counting)
        clients = read_security(Path(security)) if security else None
        return Components(
            engine,
            observers=(counting,),
            guard=SecurityGuard(clients) if clients else None,
            tls=RenewingTls(clients.tls) if clients and clients.tls else None,
            start=engine.start,
            stops=(engine.stop,),
        )

    uvloop.run(serve(checked_config(off, "the bench"), Path(home), components_of))


if __name__ == "__main__":
    only_tls_1_3()
    main(*sys.argv[1:])
