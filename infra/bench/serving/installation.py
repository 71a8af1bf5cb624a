"""What the benches of serving serve: small registered models, a server of them, Envoy before it."""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import jwt
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from numpy.typing import NDArray
from torch import Tensor, nn

from infra.bench.processes import running
from infra.gateway.config import GatewayFiles, read_plan
from infra.gateway.envoy import Admin
from infra.gateway.prepare import prepare
from tasks.contracts.base import ModelVersionRef
from tasks.contracts.conversion import MOST_ROWS, ImportedProgram, PreparedRows, Signature
from tasks.contracts.release import ModelVariant
from tasks.contracts.serving import live_addresses
from tasks.conversion.config import ConversionConfig
from tasks.conversion.targets.catalog import FORMAT
from tasks.conversion.targets.interface import ConversionJob, Runtime
from tasks.conversion.targets.pytorch import load_pytorch
from tasks.conversion.variants import build_variant
from tasks.kernel.settings import DEFAULT_FEATURE_REPO, PROJECT_ROOT, ArtifactStore, StagedFolder
from tasks.registry.candidate import register_import
from tasks.registry.config import RegistryConfig
from tasks.registry.connection import RegistryLocation
from tasks.registry.mlflow_registry import CHAMPION, PREVIOUS_TAG, Registry
from tasks.registry.model_folder import attach_variants
from tasks.registry.programs import fetch_version
from tasks.registry.promotion import note_promotion

MODEL = "bench"
FORM = "onnx-fp32"
COLUMNS = 40
CATEGORICAL, NUMERIC = 7, 72
AUDIENCE, ISSUER = "falaj", "https://issuer.test"
PLENTY = {"per_s": 1e6, "burst": 1_000_000}
HEALTHY = r"cluster\.http-(stable|candidate)\.membership_healthy"


class Dense(nn.Module):
    """As wide as the dense part of a model of tables."""

    inputs: ClassVar = {"rows": ("float32", COLUMNS)}

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(COLUMNS, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1)
        )
        self.seed = seed

    def forward(self, rows: Tensor) -> Tensor:
        """One score a row; those of different seeds are far apart."""
        logits: Tensor = self.layers(rows).squeeze(1)
        return torch.sigmoid(logits) + self.seed


class Tabular(nn.Module):
    """Embeddings, missing numbers as zero with a flag, two hidden layers, a sigmoid."""

    inputs: ClassVar = {"categorical": ("int32", CATEGORICAL), "numeric": ("float32", NUMERIC)}

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tables = nn.ModuleList(nn.Embedding(512, 16) for _ in range(CATEGORICAL))
        self.layers = nn.Sequential(
            *(nn.Linear(2 * NUMERIC + CATEGORICAL * 16, 256), nn.ReLU()),
            *(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid()),
        )

    def forward(self, categorical: Tensor, numeric: Tensor) -> Tensor:
        """One score a row."""
        absent = numeric.isnan()
        numbers = torch.where(absent, torch.zeros(()), numeric)
        embedded = [table(categorical[:, n]) for n, table in enumerate(self.tables)]
        scores: Tensor = self.layers(torch.cat([numbers, absent.float(), *embedded], 1))
        return scores.squeeze(1)


@dataclass(frozen=True)
class BenchHome:
    """An installation with a registry of its own.

    Attributes:
        network: class of the models; its `inputs` are kind and width by name.
    """

    home: Path
    network: type[Dense | Tabular] = Dense

    @property
    def location(self) -> RegistryLocation:
        """Of its registry."""
        folder = self.home / "mlflow"
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        return RegistryLocation(uri, folder / "artifacts", self.home)

    @property
    def store(self) -> ArtifactStore:
        """Of its artifacts."""
        return ArtifactStore(self.home / "artifacts")

    def add(self, seed: int, promote: bool = False) -> ModelVersionRef:
        """Register a version, convert it, and let the alias name it where asked."""
        config = RegistryConfig(model_name=MODEL, experiment="bench")
        ref = register_import(self._program(seed), config, self.location, self.store, "bench")
        attach_variants(ref, (self.form(ref),), self.location, self.store)
        if promote:
            make_champion(ref, self.location)
        return ref

    def form(self, ref: ModelVersionRef) -> ModelVariant:
        """A version's form as conversion hands it on when it was kept, unmeasured."""
        program = fetch_version(ref, self.location, self.store)
        # The form is calibrated on no rows.
        rows = self.store.build_once("corpora", "bench", PreparedRows, _no_rows)
        job = ConversionJob(program, rows, ConversionConfig(formats=(FORM,)), self.store)
        form = build_variant(FORMAT[FORM], job, ())
        if form.files is None:
            raise RuntimeError(f"{form.name} could not be built: {form.failure}")
        kept = {"name", "format", "precision", "files", "settings", "provenance"}
        return ModelVariant(
            **form.model_dump(include=kept),
            hardware_class="cpu",
            source_sha256=program.program.sha256,
            parity_max=None,
            parity_mean=None,
            latencies=(),
            num_bytes=form.files.num_bytes,
            load_ms=None,
            accepted=True,
            reason="It is measured here.",
        )

    def answers(self, ref: ModelVersionRef, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """What a version's program gives in PyTorch."""
        program = fetch_version(ref, self.location, self.store)
        model = load_pytorch(self.store.path(program.program), program.signature, Runtime())
        return model({"rows": rows})

    def _program(self, seed: int) -> ImportedProgram:
        inputs = self.network.inputs.items()
        tensors = [{"name": n, "dtype": d, "shape": ("batch", w)} for n, (d, w) in inputs]
        score = {"name": "score", "dtype": "float32", "shape": ("batch",)}
        described = {"inputs": tensors, "output": score, "largest": {"batch": MOST_ROWS}}

        def build(folder: StagedFolder) -> ImportedProgram:
            batch = torch.export.Dim("batch", min=1, max=MOST_ROWS)
            example = tuple(torch.zeros(2, w, dtype=getattr(torch, d)) for _, (d, w) in inputs)
            shapes = {name: {0: batch} for name, _ in inputs}
            network = self.network(seed).eval()
            exported = torch.export.export(network, example, dynamic_shapes=shapes)
            torch.export.save(exported, folder.path / "model.pt2")
            program = folder.artifact("model.pt2")
            return ImportedProgram(
                program=program,
                family="tensors",
                signature=Signature.model_validate(described),
                origin={"package": "bench", "version": str(seed)},
                files={"model.pt2": program.sha256},
                origin_sha256=program.sha256,
            )

        return self.store.build_once("programs", f"bench-{seed}", ImportedProgram, build)


def make_champion(ref: ModelVersionRef, location: RegistryLocation) -> None:
    """What a promotion does to the registry."""
    registry = Registry(location)
    reigning = registry.by_alias(ref.name, CHAMPION)
    version = registry.confirmed(ref)
    registry.set_tags(version, {PREVIOUS_TAG: str(reigning.number) if reigning else "none"})
    note_promotion(registry, version, datetime.now(UTC))
    registry.set_alias(version, CHAMPION)


def _no_rows(folder: StagedFolder) -> PreparedRows:
    pq.write_table(pa.table({"part": ["judged"]}), folder.path / "rows.parquet")
    data = folder.artifact("rows.parquet")
    return PreparedRows(data=data, num_calibration=1, num_judged=1, made_from={})


@contextmanager
def serving(
    home: Path, ports: Mapping[str, int], *, replicas: Any = 0, **settings: Any
) -> Iterator[psutil.Process]:
    """What serves a state folder's model, at the ports `http` and, if given, `grpc`.

    Its feature repository lies beside the state folder.

    Args:
        replicas: kept alive by a supervisor; 0 for one process without.
        settings: sections of `serving.yaml`.
    """
    repo = Path(environment_of(home)["FALAJ_FEATURE_REPO"])
    shutil.copytree(PROJECT_ROOT / DEFAULT_FEATURE_REPO, repo)
    followed = {"name": MODEL, "on_move": "offer"}
    (repo / "serving.yaml").write_text(yaml.safe_dump({"models": [followed], **settings}))
    line = ["falaj", "serve", f"--replicas={replicas}"] if replicas else ["serving"]
    command = [sys.executable, "-m", *line, f"--http-port={ports['http']}"]
    command += ["--admin-port=0"] * (not replicas)
    command += [f"--grpc-port={ports['grpc']}"] if "grpc" in ports else ["--no-grpc"]

    def is_up() -> bool:
        return len(live_addresses(home)) == (replicas or 1)

    with running(command, home.with_suffix(".log"), is_up, environment_of(home)) as process:
        yield process


def environment_of(home: Path) -> dict[str, str]:
    """Of commands on a served state folder."""
    return {"FALAJ_HOME": str(home), "FALAJ_FEATURE_REPO": f"{home}-repo"}


@dataclass
class Signer:
    """An issuer that signs tokens with ES256; its public keys are those in `published`."""

    issuer: str = ISSUER
    kid: str = "one"
    key: Any = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    published: dict[str, Any] = field(default_factory=dict)
    asked: int = 0

    def __post_init__(self) -> None:
        self.published.setdefault(self.kid, self.key)

    def rotate(self, kid: str) -> None:
        """Sign with a new key; the old ones are not published any more."""
        self.kid, self.key = kid, ec.generate_private_key(ec.SECP256R1())
        self.published = {kid: self.key}

    def keys(self) -> str:
        """The published keys as a JWKS."""
        entries = [
            json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
            | {"kid": kid, "alg": "ES256", "use": "sig"}
            for kid, key in self.published.items()
        ]
        return json.dumps({"keys": entries})

    def token(
        self, *roles: str, key: Any = None, alg: str = "ES256", kid: str = "", **claims: Any
    ) -> str:
        """A token; claims that are None are left out."""
        now = int(time.time())
        usual = {"iss": self.issuer, "aud": AUDIENCE, "sub": "somebody", "iat": now}
        content = usual | {"exp": now + 600, "roles": list(roles)} | claims
        content = {name: value for name, value in content.items() if value is not None}
        signing = self.key if key is None else key
        return jwt.encode(content, signing, algorithm=alg, headers={"kid": kid or self.kid})


def write_settings(
    home: Path, signer: Signer, ports: Mapping[str, int], model: str = MODEL
) -> dict[str, Any]:
    """Let Envoy listen at the port `edge` and ask that of `http`; returns who may ask."""
    for name in ("edge", "serving"):
        (home / name).mkdir(parents=True, exist_ok=True)
    keys = home / "serving" / "keys.json"
    keys.write_text(signer.keys())
    issuer = {"issuer": signer.issuer, "audience": AUDIENCE, "keys": str(keys)}
    security = {"issuers": [issuer], "limits": {"client": PLENTY}}
    edge = {
        "models": {model: {}},
        "listen": f"127.0.0.1:{ports['edge']}",
        "http": [f"127.0.0.1:{ports['http']}"],
        "grpc": [f"127.0.0.1:{ports['grpc']}"],
        "limit": PLENTY,
        "address_limit": PLENTY,
        "workers": 1,
    }
    (home / "serving" / "security.yaml").write_text(yaml.safe_dump(security))
    (home / "edge" / "edge.yaml").write_text(yaml.safe_dump(edge))
    prepare(read_plan(home))
    return security


@contextmanager
def envoy(home: Path) -> Iterator[psutil.Process]:
    """Envoy, once it is ready and has found its server well."""
    admin = Admin(GatewayFiles(home).folder)

    def is_well() -> bool:
        found = admin.stats(HEALTHY) if admin.is_ready() else {}
        return bool(found) and all(found.values())

    command = [sys.executable, "-m", "falaj", "--home", str(home), "gateway", "run"]
    with running(command, home.with_suffix(".envoy.log"), is_well) as guard:
        (found,) = [one for one in guard.children(recursive=True) if "envoy" in one.name()]
        yield found
