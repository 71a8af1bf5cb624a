"""Reading what another process's flow run returned: plain JSON, checked against the flow's type.

Nothing is unpickled, and no class that the stored text names is imported: the reader alone says
what the result must be.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from prefect import Flow
from prefect._internal.result_records import ResultRecordMetadata
from prefect.client.schemas.objects import FlowRun
from prefect.filesystems import LocalFileSystem
from prefect.results import get_default_result_storage, resolve_result_storage
from pydantic import TypeAdapter, ValidationError

from tasks.kernel.errors import StageError

MARKED = {"__class__", "data"}
"""Prefect writes a model as its class's name and its data."""


def dump_parameters(flow: Flow[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of a flow as plain JSON, by name."""
    bound = inspect.signature(flow.fn).bind(*args, **kwargs).arguments
    hints = get_type_hints(flow.fn)
    return {
        name: TypeAdapter(hints[name]).dump_python(value, mode="json")
        for name, value in bound.items()
    }


def read_plain(run: FlowRun) -> Any:
    """What a completed run returned, as plain JSON.

    Raises:
        StageError: it kept no result, not as JSON, or not where this process can read it.
    """
    return unmarked(json.loads(_stored_text(run)))


def as_returned(plain: Any, flow: Flow[..., Any]) -> Any:
    """Plain JSON of a run's result as the value that `flow` returns.

    Raises:
        StageError: it is something else.
    """
    try:
        return result_type(flow).validate_python(plain)
    except ValidationError as exc:
        raise StageError(
            f"a run of {flow.name} returned something else than this code's flow does "
            f"({exc.error_count()} faults, the first at {exc.errors()[0]['loc']}); its worker runs "
            "other code. Deploy the same code to all workers and retry"
        ) from exc


@cache
def result_type(flow: Flow[..., Any]) -> TypeAdapter[Any]:
    """Type that a flow's annotation says it returns."""
    return TypeAdapter(get_type_hints(flow.fn)["return"])


def unmarked(value: Any) -> Any:
    """Plain data of a value in which models are marked with their class."""
    if isinstance(value, dict):
        if value.keys() == MARKED:
            return unmarked(value["data"])
        return {name: unmarked(item) for name, item in value.items()}
    return [unmarked(item) for item in value] if isinstance(value, list) else value


def _stored_text(run: FlowRun) -> str:
    metadata = run.state.data if run.state else None
    if not isinstance(metadata, ResultRecordMetadata) or metadata.storage_key is None:
        raise StageError(
            f"run {run.name} kept no result; its flow needs persist_result=True. Deploy the code "
            "of this process to its worker and retry"
        )
    if metadata.serializer.type != "json":
        raise StageError(
            f"run {run.name} kept its result as {metadata.serializer.type!r}; only json is read, "
            "because others can run code. Deploy the code of this process to its worker"
        )
    try:
        content: bytes = _storage(metadata).read_path(metadata.storage_key, _sync=True)
    except (ValueError, FileNotFoundError, OSError) as exc:
        raise StageError(
            f"the result of run {run.name} cannot be read here ({exc}); let all workers share one "
            "result storage (PREFECT_LOCAL_STORAGE_PATH on one host, else "
            "PREFECT_DEFAULT_RESULT_STORAGE_BLOCK), then retry. The stage itself is finished"
        ) from exc
    return str(content, "utf-8")


def _storage(metadata: ResultRecordMetadata) -> Any:
    if metadata.storage_block_id is not None:
        return resolve_result_storage(metadata.storage_block_id)
    key = Path(str(metadata.storage_key))
    if key.is_absolute():  # what an unsaved local file system writes
        return LocalFileSystem(basepath=str(key.parent))
    return get_default_result_storage()
