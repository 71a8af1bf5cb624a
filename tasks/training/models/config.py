"""Which model a training makes, and how boosted trees are grown."""

import re
from typing import Literal

from pydantic import Field, PositiveInt

from tasks.kernel.values import Described

NETWORK: Literal["network"] = "network"
BOOSTING: Literal["gradient-boosting"] = "gradient-boosting"
AVERAGE: Literal["average"] = "average"
OWN_MODEL = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def checked_model(name: str) -> str:
    """The name of a model, where it may be one.

    Raises:
        ValueError: it is neither a model of ours nor `package:function`.
    """
    if name not in (NETWORK, BOOSTING, AVERAGE) and not OWN_MODEL.fullmatch(name):
        raise ValueError(
            f"model={name!r} is no model; expected {NETWORK}, {BOOSTING}, {AVERAGE}, or "
            "package:function for a PyTorch module of your own, such as my_package:build"
        )
    return name


class BoostingConfig(Described):
    """How gradient boosting grows its trees; of `gradient-boosting` and `average` alone."""

    library: Literal["sklearn", "lightgbm"] = "sklearn"
    """Who grows the trees: histogram boosting of scikit-learn, or LightGBM, which is an extra."""
    max_iterations: int = Field(default=300, ge=1, le=2000)
    """Trees at most; the validation window says how many are kept."""
    learning_rate: float = Field(default=0.05, gt=0, le=1)
    """Share of each tree's answer that counts."""
    max_leaf_nodes: int = Field(default=31, ge=2, le=128)
    """Leaves of a tree, at most. As tensors a tree takes their square."""
    min_leaf_rows: PositiveInt = Field(default=100, le=1_000_000)
    """Training rows of a leaf, at least."""
    max_rows: int = Field(default=2_000_000, ge=1000, le=100_000_000)
    """Rows of a window that are held in memory; of more a seeded sample."""
