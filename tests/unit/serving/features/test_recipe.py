"""Columns as model inputs, as training made them; what a version was trained with."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import BadRequestError
from serving.features.reads import Waiting, _made
from serving.features.recipe import Recipe, build_inputs, registry_origins
from tasks.contracts.data import DatasetSchema, category_code
from tasks.features.online.answer import OnlineAnswer
from tasks.kernel.errors import DataContractError, RegistryError
from tasks.kernel.settings import Settings
from tasks.registry.mlflow_registry import Registry
from tasks.registry.model_folder import MANIFEST_FILE
from tests.support.data.builders import COLUMNS
from tests.support.registry.builders import World

SCHEMA = DatasetSchema(
    row_id="id",
    event_time="at",
    label="y",
    categorical=("kind", "place"),
    numeric=("size", "weight", "count"),
)
ROW = st.fixed_dictionaries(
    {
        "kind": st.none() | st.text(max_size=5),
        "place": st.none() | st.sampled_from(["", "a", "é", "A A", "a\0", "\0"]),
        "size": st.none() | st.floats(width=32),
        "weight": st.none() | st.floats(),
        "count": st.none() | st.integers(-(2**40), 2**40),
    }
)


@given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_inputs_are_those_that_training_makes_of_the_same_rows(rows: list[dict[str, Any]]) -> None:
    frame = pd.DataFrame(
        {
            "kind": pd.Series([r["kind"] for r in rows], dtype=object),
            "place": pd.Series([r["place"] for r in rows], dtype=object),
            "size": pd.array([r["size"] for r in rows], dtype="Float32"),
            "weight": np.array([np.nan if r["weight"] is None else r["weight"] for r in rows]),
            "count": pd.array([r["count"] for r in rows], dtype="Int64"),
        }
    )
    with np.errstate(over="ignore"):
        categorical, numeric = SCHEMA.model_inputs(frame)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns["size"] = frame["size"].to_numpy(np.float32, na_value=np.nan)
    made = build_inputs(SCHEMA, columns, len(rows))
    np.testing.assert_array_equal(made["categorical"], categorical)
    np.testing.assert_array_equal(made["numeric"], numeric)
    assert made["categorical"].dtype == np.int32
    assert made["numeric"].dtype == np.float32


@pytest.mark.parametrize("said", [[True, False], ["true", "false"], np.array([True, False])])
def test_what_is_true_or_false_is_the_category_that_training_made_of_it(said: Any) -> None:
    codes = [[category_code("true"), 0], [category_code("false"), 0]]
    assert build_inputs(SCHEMA, {"kind": said}, 2)["categorical"].tolist() == codes
    frame = pd.DataFrame({"kind": said, "place": None, "size": 1, "weight": 1, "count": 1})
    assert SCHEMA.model_inputs(frame)[0].tolist() == codes


@pytest.mark.parametrize("bad", ["7", [1.0], {"a": 1}, b"7"])
def test_what_is_no_number_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(BadRequestError, match=r"column size holds .*, expected a number"):
        build_inputs(SCHEMA, {"size": [1.0, bad]}, 2)


class Lengths:
    """Gives the length of a text, where an encoder gives its meaning."""

    def columns(self, values: list[Any]) -> dict[str, Any]:
        if not all(value is None or isinstance(value, str) for value in values):
            raise DataContractError("column note holds no text")
        return {"size": np.array([np.nan if v is None else len(v) for v in values], np.float32)}


def test_a_text_of_a_request_becomes_the_numbers_that_the_model_takes() -> None:
    parts: Any = {"columns": SCHEMA, "encoders": {"note": Lengths()}}
    empty: Any = dict.fromkeys(("reader", "views", "keys", "request_columns"), ())
    recipe = Recipe(model="m", version="1", service="s", **parts, **empty)
    stored: Any = {"weight": np.array([1, 2], np.float32)}
    answer = OnlineAnswer("s", 2, stored, (), *(np.empty(0) for _ in range(4)))  # type: ignore[arg-type]

    def made(note: list[Any]) -> Any:
        return _made(Waiting(recipe, {"kind": ["a", "b"], "note": note}, 2, None), answer)  # type: ignore[arg-type]

    inputs, features = made(["four", None])
    np.testing.assert_array_equal(inputs["numeric"][:, :2], [[4, 1], [np.nan, 2]])
    assert features.given["note"] == ["four", None]
    assert isinstance(made(["four", 4]), BadRequestError)


def test_a_manifest_says_the_service_and_a_changed_one_says_nothing(tmp_path: Path) -> None:
    world = World.at(tmp_path)
    ref, _ = world.register()
    origins = registry_origins(Settings(home=tmp_path, feature_repo=tmp_path))
    origin = origins(ref.name, str(ref.version))
    assert origin.feature_service == "flight_delay_v1"
    assert origin.feature_views == {"carrier_stats": "0" * 32}
    assert origin.columns == COLUMNS
    with pytest.raises(RegistryError, match="version 9 is not in the registry"):
        origins(ref.name, "9")
    registered = Registry(world.location).version(ref.name, ref.version)
    (registered.folder / MANIFEST_FILE).write_text("{}")
    with pytest.raises(RegistryError, match="has SHA-256"):
        origins(ref.name, str(ref.version))
