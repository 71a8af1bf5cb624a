import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.contracts.data import category_code
from tasks.kernel.errors import ArtifactError
from tasks.training.config import TrainingConfig
from tasks.training.core.network import TabularNetwork
from tasks.training.core.warm_start import Fitted, warm_start
from tasks.training.data.preprocess import Preprocessing
from tests.support.data.builders import COLUMNS

CONFIG = TrainingConfig(hidden_sizes=(12, 8))
NAMES = [f"value {n}" for n in range(30)]


def fitted(
    vocabularies: dict[str, list[str]], edges: dict[str, list[float]], flagged: tuple[str, ...]
) -> Fitted:
    codes = [sorted(map(category_code, known)) for known in vocabularies.values()]
    return Fitted(
        Preprocessing(
            vocabularies=tuple(np.array(c, dtype=np.int32) for c in codes),
            edges=tuple(np.array(e, dtype=np.float32) for e in edges.values()),
            flagged=tuple(k for k, name in enumerate(edges) if name in flagged),
        ),
        COLUMNS.model_copy(update={"categorical": tuple(vocabularies), "numeric": tuple(edges)}),
    )


def like_old(num_carriers: int = 9, temp: Sequence[float] = (-2.0, 0.0, 1.0, 4.0)) -> Fitted:
    return fitted(
        {"carrier": NAMES[:num_carriers], "dest": NAMES[:4]},
        {"temp": list(temp), "gust": [0.0, 1.0, 2.0], "still": []},
        ("gust",),
    )


OLD = like_old()


def network(of: Fitted, seed: int = 0, config: TrainingConfig = CONFIG) -> TabularNetwork:
    torch.manual_seed(seed)
    return TabularNetwork(of.preprocessing, config).eval()


def started(
    new: Fitted, champion: TabularNetwork, config: TrainingConfig = CONFIG
) -> tuple[TabularNetwork, list[str]]:
    made = network(new, seed=1, config=config)
    weights, lines = warm_start(made.state_dict(), new, champion.state_dict(), OLD)
    made.load_state_dict(weights)
    return made, lines


def logits(
    of: TabularNetwork, what: Fitted, categories: dict[str, list[str]], numbers: dict[str, Any]
) -> np.ndarray:
    texts = (categories[name] for name in what.columns.categorical)
    codes = [list(map(category_code, of_column)) for of_column in texts]
    positions = what.preprocessing.category_positions(np.array(codes, dtype=np.int32).T)
    numeric = np.array([numbers[name] for name in what.columns.numeric], dtype=np.float32).T
    with torch.no_grad():
        return of(torch.from_numpy(positions), torch.from_numpy(numeric)).double().numpy()


def same(
    new: Fitted,
    categories: dict[str, list[str]],
    numbers: dict[str, Any],
    champion: TabularNetwork | None = None,
) -> tuple[TabularNetwork, list[str]]:
    """What starts from the champion, after it has given the same logits for these rows."""
    champion = champion or network(OLD)
    made, lines = started(new, champion)
    expected = logits(champion, OLD, categories, numbers)
    np.testing.assert_allclose(logits(made, new, categories, numbers), expected, atol=2e-5)
    return made, lines


def rows(draw: Any, names: list[str], values: st.SearchStrategy[float]) -> tuple[Any, Any]:
    count = 6
    categories = {
        name: draw(st.lists(st.sampled_from(names), min_size=count, max_size=count))
        for name in ("carrier", "dest")
    }
    numbers = {
        name: draw(st.lists(values, min_size=count, max_size=count))
        for name in ("temp", "gust", "still")
    }
    return categories, numbers


ANY_NUMBER = st.floats(-10, 10, width=32)


@given(st.data())
def test_more_categories_and_finer_bins_change_nothing_at_first(data: st.DataObject) -> None:
    more = data.draw(st.integers(9, 30))
    extra = data.draw(st.sets(st.integers(-24, 56), max_size=8))
    temp = sorted({-2.0, 0.0, 1.0, 4.0, *(edge / 8 for edge in extra)})
    finer = fitted(
        {"dest": NAMES[:more], "carrier": NAMES[:more]},  # other widths, another order
        {"still": [], "gust": [-1.0, 0.0, 1.0, 1.5, 2.0], "temp": temp},
        ("gust", "temp"),
    )
    same(finer, *rows(data.draw, [*NAMES, ""], st.one_of(ANY_NUMBER, st.just(float("nan")))))


@given(st.data())
def test_on_any_other_bins_it_is_the_champion_at_their_edges(data: st.DataObject) -> None:
    edges = sorted(data.draw(st.sets(st.integers(-40, 60), min_size=2, max_size=9)))
    temp = [edge / 8 for edge in edges]
    other = like_old(temp=temp)
    categories, numbers = rows(data.draw, NAMES, ANY_NUMBER)
    numbers["temp"] = data.draw(st.lists(st.sampled_from(temp), min_size=6, max_size=6))
    same(other, categories, numbers)


def test_a_new_column_changes_nothing_at_first_and_is_named() -> None:
    wider = fitted(
        {"carrier": NAMES[:9], "dest": NAMES[:4], "tail": NAMES[:3]},
        {"temp": [-2.0, 0.0, 1.0, 4.0], "gust": [0.0, 1.0, 2.0], "still": [], "wind": [0.0, 9.0]},
        ("gust", "wind"),
    )
    categories = {name: NAMES[:3] for name in ("carrier", "dest", "tail")}
    numbers = {name: [0.5, 1.5, float("nan")] for name in ("temp", "gust", "still", "wind")}
    numbers["temp"] = [0.1, 0.2, 0.3]
    made, lines = same(wider, categories, numbers)
    assert "category tail: the champion does not have this column" in lines
    assert "number wind: the champion does not have this column" in lines
    made.train()
    made(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 4)).sum().backward()
    gradient = made.perceptron[0].weight.grad
    assert gradient.abs().sum(0).count_nonzero() > 0  # zeros learn like any other weights


def test_a_narrower_table_keeps_what_varies_most() -> None:
    fewer = like_old(num_carriers=4)  # from 4 embedding columns to 3
    champion = network(OLD)
    with torch.no_grad():  # a table of rank 2 fits into 3 columns whole
        champion.tables[0].copy_(torch.randn(10, 2) @ torch.randn(2, 4))
    categories = {"carrier": [*NAMES[:4], "new"], "dest": [NAMES[0]] * 5}
    numbers = {name: [0.5] * 5 for name in ("temp", "gust", "still")}
    _, lines = same(fewer, categories, numbers, champion)
    assert any("5 of its own are unknown now" in line for line in lines)


@pytest.mark.parametrize(
    ("sizes", "sentence", "layers"),
    [
        ((20, 8), "all layers: the champion's first one has 12 units, this one has 20", 0),
        ((12, 9), "perceptron.3.weight and what follows it", 1),
        ((12,), "perceptron.3.weight and what follows it", 1),
        ((12, 8, 4), "perceptron.6.weight and what follows it", 2),
    ],
)
def test_layers_are_taken_over_up_to_the_first_that_does_not_fit(
    sizes: tuple[int, ...], sentence: str, layers: int
) -> None:
    config = TrainingConfig(hidden_sizes=sizes)
    champion = network(OLD)
    made, lines = started(OLD, champion, config)
    assert any(line.startswith(sentence) for line in lines)
    assert torch.equal(made.tables[0], champion.tables[0])
    for layer in range(len(sizes)):
        index = 3 * layer
        mine, theirs = (of.state_dict()[f"perceptron.{index}.bias"] for of in (made, champion))
        equal = mine.shape == theirs.shape and torch.allclose(mine, theirs, atol=1e-6)
        assert equal == (layer < layers)


def test_a_number_that_became_constant_is_named() -> None:
    _, lines = started(like_old(temp=[]), network(OLD))
    assert "number temp: is constant now; what it meant is left out" in lines


STATE = OLD.preprocessing.state()


def test_what_was_fitted_survives_a_checkpoint_that_holds_plain_values_only() -> None:
    content = io.BytesIO()
    torch.save(STATE, content)
    content.seek(0)
    read = Fitted.from_state(torch.load(content, weights_only=True), OLD.columns)
    assert read.columns == OLD.columns
    assert read.preprocessing.flagged == OLD.preprocessing.flagged
    for mine, theirs in zip(
        (*read.preprocessing.vocabularies, *read.preprocessing.edges),
        (*OLD.preprocessing.vocabularies, *OLD.preprocessing.edges),
        strict=True,
    ):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize(
    "state", [None, {}, {**STATE, "edges": []}, {**STATE, "vocabularies": [1, 2]}]
)
def test_a_checkpoint_that_does_not_say_it_is_refused(state: object) -> None:
    with pytest.raises(ArtifactError, match="Train without a warm start"):
        Fitted.from_state(state, OLD.columns)
