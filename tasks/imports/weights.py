"""Files of a BERT encoder, found without importing their package, and read without unpickling."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file

from tasks.imports.config import EncoderConfig
from tasks.imports.network import EncoderShape, TextEncoder
from tasks.kernel.errors import ArtifactError, ConfigurationError

SHAPE_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
FILES = (SHAPE_FILE, WEIGHTS_FILE, TOKENIZER_FILE)
ASIDE = "weights"
"""Folder of the environment with packages that nothing imports."""
EXPECTED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_UNUSED = re.compile(r"pooler\.|embeddings\.position_ids|cls\.")
_NAMES = (
    (r"^bert\.", ""),
    (r"^embeddings\.word_embeddings", "embedded.tokens"),
    (r"^embeddings\.position_embeddings", "embedded.positions"),
    (r"^embeddings\.token_type_embeddings", "embedded.kinds"),
    (r"^embeddings\.LayerNorm", "embedded.norm"),
    (r"^encoder\.layer\.", "layers."),
    (r"attention\.self\.", "attention."),
    (r"attention\.output\.dense", "attention.output"),
    (r"attention\.output\.LayerNorm", "attention_norm"),
    (r"intermediate\.dense", "inner"),
    (r"(\d)\.output\.dense", r"\1.outer"),
    (r"(\d)\.output\.LayerNorm", r"\1.norm"),
)


class EncoderFiles(NamedTuple):
    """The files of an encoder, and what tells where they come from."""

    folder: Path
    origin: dict[str, str]


def find_files(config: EncoderConfig) -> EncoderFiles:
    """Locate the encoder's files.

    Raises:
        ConfigurationError: the package is not installed, or a file is not there.
    """
    folder, origin = config.folder, dict[str, str]()
    if config.package is not None:
        package = _package(config.package)
        folder = Path(str(package.locate_file(config.folder)))
        origin = {"package": config.package, "version": package.version}
        for field in ("License", "License-Expression"):
            if field in package.metadata:
                origin["licence"] = package.metadata[field]
    absent = [name for name in FILES if not (folder / name).is_file()]
    if absent:
        raise ConfigurationError(
            f"{config.folder} {'of ' + config.package + ' ' if config.package else ''}lacks "
            f"{', '.join(absent)}; expected the files of a BERT encoder: {', '.join(FILES)}"
        )
    return EncoderFiles(folder, origin)


def _package(name: str) -> Distribution:
    """A package of this environment, or one that set-up put beside it for its files alone."""
    places = [*sys.path, str(Path(sys.prefix) / ASIDE)]
    package = next(iter(distributions(name=name, path=places)), None)
    if package is None:
        raise ConfigurationError(
            f"package {name!r} is not installed here. Name it in infra/weights/requirements.in, "
            "then call `make lock` and `make setup`; only its files are used"
        )
    return package


def read_encoder(files: EncoderFiles) -> tuple[TextEncoder, EncoderShape]:
    """The network with its trained weights, ready to be exported.

    Raises:
        ConfigurationError: it is no encoder of the kind that is built here.
        ArtifactError: the weights are damaged, or are those of another network.
    """
    shape = _shape(files)
    network = TextEncoder(shape)
    try:
        tensors = load_file(files.folder / WEIGHTS_FILE)
    except (SafetensorError, OSError) as exc:
        raise ArtifactError(f"{WEIGHTS_FILE} cannot be read ({exc}); install it again") from exc
    renamed = {_own_name(name): t for name, t in tensors.items() if not _UNUSED.search(name)}
    try:
        network.load_state_dict(renamed)
    except RuntimeError as exc:
        reason = " ".join(str(exc).split())[:300]
        raise ArtifactError(
            f"{WEIGHTS_FILE} does not fit {SHAPE_FILE}: {reason}. They belong to different models"
        ) from exc
    return network.eval(), shape


def _shape(files: EncoderFiles) -> EncoderShape:
    try:
        values = json.loads((files.folder / SHAPE_FILE).read_text(encoding="utf-8"))
        shape = EncoderShape.model_validate(values)
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as exc:
        raise ConfigurationError(f"{SHAPE_FILE} describes no BERT encoder: {exc}") from exc
    other = {k: v for k, e in EXPECTED.items() if (v := values.get(k, e)) != e}
    if other:
        raise ConfigurationError(
            f"{SHAPE_FILE} says {other}, expected {EXPECTED}. Export this network to a .pt2 "
            "program elsewhere and import that"
        )
    return shape


def _own_name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name
