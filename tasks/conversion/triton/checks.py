"""Is a model configuration one that Triton will take?"""

from __future__ import annotations

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from tasks.kernel.errors import ConversionError
from tasks.kernel.settings import tool_python

SCHEMA_FILE = "tritonclient/grpc/model_config_pb2.py"
SCHEMA_PACKAGE = "tritonclient"


def check_schema(text: str, name: str) -> str:
    """Parse a configuration with Triton's own schema.

    Args:
        text: what `config.pbtxt` says.
        name: of the model.

    Returns:
        Whose schema it was; empty where there is none on this machine.

    Raises:
        ConversionError: it has fields or values that Triton does not know.
    """
    found = _schema()
    if found is None:
        return ""
    from google.protobuf import text_format

    message, schema = found
    try:
        text_format.Parse(text, message())
    except text_format.ParseError as exc:
        raise ConversionError(
            f"the configuration of {name} is not one of Triton's: {exc}. Nothing was kept of it"
        ) from exc
    return schema


@cache
def _schema() -> tuple[Any, str] | None:
    """The message `ModelConfig` of Triton's client, and which version of it.

    The file alone is executed: its package wants a protobuf older than the project's, which the
    generated code runs under all the same. It is looked for here, and in the environment of Triton.
    """
    path = _schema_file()
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("falaj_triton_model_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (info,) = path.parents[2].glob(f"{SCHEMA_PACKAGE}-*.dist-info")
    return module.ModelConfig, info.name.removesuffix(".dist-info").replace("-", " ")


def _schema_file() -> Path | None:
    try:
        return Path(str(distribution(SCHEMA_PACKAGE).locate_file(SCHEMA_FILE)))
    except PackageNotFoundError:
        python = tool_python("triton")
        found = python.parents[1].glob(f"lib/*/site-packages/{SCHEMA_FILE}") if python else ()
        return next(iter(found), None)
