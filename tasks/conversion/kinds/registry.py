"""All families of models that the conversion knows."""

from __future__ import annotations

from tasks.contracts.release import RegisteredProgram
from tasks.conversion.config import ConversionConfig, QualityBound
from tasks.conversion.kinds.interface import Family
from tasks.conversion.kinds.tabular import TABULAR
from tasks.conversion.kinds.tensors import TENSORS
from tasks.conversion.kinds.text_embedding import TEXT_EMBEDDING
from tasks.kernel.errors import ConfigurationError

FAMILIES = {family.name: family for family in (TABULAR, TEXT_EMBEDDING, TENSORS)}


def family_of(program: RegisteredProgram) -> Family:
    """The family that a program says it is of.

    Raises:
        ConfigurationError: the conversion knows no such family.
    """
    family = FAMILIES.get(program.family)
    if family is None:
        raise ConfigurationError(
            f"{program.version.name} version {program.version.version} is of the family "
            f"{program.family!r}, conversion knows {', '.join(FAMILIES)}. Nothing was converted; "
            "register the program with one of these, or add a family"
        )
    return family


def bound_of(family: Family, precision: str, config: ConversionConfig) -> QualityBound:
    """What a form of this precision may change: the configuration's bound, else the family's.

    Raises:
        ConfigurationError: neither has one.
    """
    bound = config.bounds.get(precision) or family.bounds.get(precision)
    if bound is None:
        raise ConfigurationError(
            f"there is no bound for {precision} forms of the family {family.name!r}; set "
            f"conversion.bounds.{precision}"
        )
    return bound
