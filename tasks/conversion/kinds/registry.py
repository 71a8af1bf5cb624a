"""All kinds of models that the conversion knows."""

from __future__ import annotations

from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.kinds.interface import ModelKind
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.kinds.tensors import TENSORS
from tasks.conversion.kinds.text_embedding import TEXT_EMBEDDING
from tasks.kernel.errors import ConfigurationError

KINDS = {kind.name: kind for kind in (TABULAR, TEXT_EMBEDDING, TENSORS)}


def kind_of(program: RegisteredProgram) -> ModelKind:
    """The kind that a program is recorded with.

    Raises:
        ConfigurationError: the conversion knows no such kind.
    """
    kind = KINDS.get(program.family)
    if kind is None:
        raise ConfigurationError(
            f"{program.version.name} version {program.version.version} is of the kind "
            f"{program.family!r}, conversion knows {', '.join(KINDS)}. Nothing was converted; "
            "register the program with one of these, or add a kind"
        )
    return kind


def bound_of(kind: ModelKind, precision: str, config: ConversionConfig) -> QualityBound:
    """What a variant of this precision may change: the configured bound, else that of the kind.

    Raises:
        ConfigurationError: neither has one.
    """
    bound = config.bounds.get(precision) or kind.bounds.get(precision)
    if bound is None:
        raise ConfigurationError(
            f"there is no bound for {precision} variants of the kind {kind.name!r}; set "
            f"conversion.bounds.{precision}"
        )
    return bound
