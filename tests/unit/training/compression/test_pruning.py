import pytest
import torch
from torch import nn

from tasks.kernel.errors import ArtifactError, ConfigurationError
from tasks.kernel.files import digest_of
from tasks.kernel.settings import ArtifactStore
from tasks.training.compression.plan import (
    hidden_sizes_of,
    pruned_start,
    pruned_weights,
    read_checkpoint,
)
from tasks.training.core.network import TabularNetwork
from tests.support.training.parents import LARGE, large_network, parent, preprocessing, raw_rows

ROWS = 300


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    codes, numeric = raw_rows(preprocessing(), ROWS)
    return torch.from_numpy(preprocessing().category_positions(codes)), torch.from_numpy(numeric)


def kept_units(before: nn.Linear, after: nn.Linear) -> list[int]:
    """Which units are left, by their biases, which no two units share."""
    biases = before.bias.tolist()
    return [biases.index(value) for value in after.bias.tolist()]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.75])
def test_what_is_left_computes_what_the_whole_network_does_with_the_lost_units_silent(
    share: float,
) -> None:
    whole = large_network()
    left = pruned_weights(whole.state_dict(), share)
    sizes = hidden_sizes_of(left)
    assert sizes == tuple(int(size * (1 - share)) for size in LARGE.hidden_sizes)
    small = TabularNetwork(preprocessing(), LARGE.model_copy(update={"hidden_sizes": sizes})).eval()
    small.load_state_dict(left)
    masked = large_network()
    with torch.no_grad():
        for position in (0, 3):
            kept = kept_units(masked.perceptron[position], small.perceptron[position])
            assert kept == sorted(kept)
            lost = [unit for unit in range(LARGE.hidden_sizes[position // 3]) if unit not in kept]
            masked.perceptron[position + 3].weight[:, lost] = 0.0
        torch.testing.assert_close(small(*inputs()), masked(*inputs()), rtol=0, atol=1e-6)
        assert not torch.allclose(small(*inputs()), whole(*inputs()), atol=1e-4)


def test_the_units_of_least_weight_go() -> None:
    strengths = torch.tensor([0.1, 3.0, 0.2, 2.0])
    network = {
        "perceptron.0.weight": strengths[:, None].expand(4, 3),
        "perceptron.0.bias": strengths,
        "perceptron.2.weight": strengths[None],
        "perceptron.2.bias": torch.zeros(1),
    }
    left = pruned_weights(network, 0.5)
    assert left["perceptron.0.weight"][:, 0].tolist() == [3.0, 2.0]
    assert left["perceptron.0.bias"].tolist() == [3.0, 2.0]
    assert left["perceptron.2.weight"].tolist() == [[3.0, 2.0]]


def test_a_layer_that_would_be_left_empty_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"takes all 16 units of hidden layer perceptron\.3"
    ):
        pruned_weights(large_network().state_dict(), 0.95)


def test_a_network_without_a_hidden_layer_cannot_be_pruned_and_what_can_be_done_is_named() -> None:
    with pytest.raises(ConfigurationError, match="choose method 'distillation'"):
        pruned_weights({"perceptron.0.weight": torch.ones(1, 2)}, 0.5)


def test_a_start_keeps_the_preprocessing_and_names_its_parent(store: ArtifactStore) -> None:
    made = parent(store)
    start = pruned_start(made, 0.5, store)
    assert start.version == made.program.version
    assert start.trained_on == made.splits.train
    content = read_checkpoint(start.checkpoint, store)
    assert hidden_sizes_of(content["network"]) == (16, 8)
    before = read_checkpoint(made.checkpoint, store)["preprocessing"]["vocabularies"]
    for kept, was in zip(content["preprocessing"]["vocabularies"], before, strict=True):
        assert torch.equal(kept, was)
    assert pruned_start(made, 0.5, store) == start


def test_a_checkpoint_that_holds_no_network_is_a_sentence(store: ArtifactStore) -> None:
    good = parent(store).checkpoint
    torch.save({"weights": torch.ones(1)}, store.root / good.uri.split(":")[1])
    odd = good.model_copy(update={"sha256": digest_of(store.root / good.uri.split(":")[1])})
    with pytest.raises(ArtifactError, match="holds no network"):
        read_checkpoint(odd, store)
