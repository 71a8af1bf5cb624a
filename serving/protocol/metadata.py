"""What a server and its models say of themselves, for both protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from serving.calls import SLOTS
from serving.errors import UnknownModelError
from serving.interfaces import Engine, VersionState
from serving.protocol.tensors import DATATYPE_OF
from tasks.contracts.conversion import TensorSpec

SERVER_NAME = "falaj"
EXTENSIONS = ("binary_tensor_data", "model_repository")


def server_metadata() -> dict[str, Any]:
    """Name, version and extensions of the server."""
    try:
        number = version("falaj")
    except PackageNotFoundError:  # run from a checkout that is not installed
        number = "0"
    return {"name": SERVER_NAME, "version": number, "extensions": list(EXTENSIONS)}


def model_metadata(engine: Engine, model: str, version: str | None = None) -> dict[str, Any]:
    """Versions, platform and tensors of a model.

    Raises:
        UnknownModelError: there is no such model or version.
        NotReadyError: it cannot answer now.
    """
    signature = engine.signature(model, version)
    states = [state for state in engine.states() if state.name == model]
    return {
        "name": model,
        "versions": [state.version for state in states if state.state == "READY"],
        "platform": _platform(states, version),
        "inputs": [tensor_metadata(spec) for spec in signature.inputs],
        "outputs": [tensor_metadata(signature.output)],
    }


def tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    """Name, datatype and shape of a tensor; an axis of any length is -1."""
    return {
        "name": spec.name,
        "datatype": DATATYPE_OF[np.dtype(spec.dtype)],
        "shape": [length if isinstance(length, int) else -1 for length in spec.shape],
    }


def repository_index(engine: Engine, only_ready: bool) -> list[dict[str, str]]:
    """All versions of all models, and what is with them."""
    return [
        {"name": s.name, "version": s.version, "state": s.state, "reason": s.reason}
        for s in engine.states()
        if s.state == "READY" or not only_ready
    ]


def refuse_unknown(engine: Engine, model: str, version: str | None) -> None:
    """Refuse a model or version that nothing is known of.

    Raises:
        UnknownModelError: there is none.
    """
    states = [state for state in engine.states() if state.name == model]
    if not states:
        raise UnknownModelError(f"there is no model {model!r} here")
    if version is not None and version not in (state.version for state in states):
        there = ", ".join(state.version for state in states)
        raise UnknownModelError(f"model {model!r} has no version {version!r} here; it has {there}")


def admin_state(engine: Engine, model: str) -> dict[str, Any]:
    """Slots and versions of a model, for the admin interface.

    Raises:
        UnknownModelError: there is no such model.
    """
    refuse_unknown(engine, model, None)
    states = [state for state in engine.states() if state.name == model]
    return {
        "name": model,
        "ready": engine.is_ready(model),
        "slots": {
            slot: next((state.version for state in states if slot in state.slots), None)
            for slot in SLOTS
        },
        "versions": [version_state(state) for state in states],
    }


def version_state(state: VersionState) -> dict[str, Any]:
    """A version's state as plain data, without the model's name."""
    return {name: value for name, value in asdict(state).items() if name != "name"}


def _platform(states: Sequence[VersionState], version: str | None) -> str:
    def fits(state: VersionState) -> bool:
        return state.version == version if version is not None else "stable" in state.slots

    return next((state.platform for state in states if fits(state)), "")
