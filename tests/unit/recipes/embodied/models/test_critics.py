"""Ensembles of critics against single networks, and their normalizations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.critics import BatchRenorm, Critics, EnsembleLinear, Norm
from recipes.embodied.models.small.squashed_policy import features_of

SPEC = EnvSpec(state_size=5, action_size=2)


def test_each_member_is_a_network_of_its_own() -> None:
    torch.manual_seed(0)
    critics = Critics(SPEC, 3, 8)
    inputs, actions = {"states": torch.randn(4, 5)}, torch.randn(4, 2)
    values = critics(inputs, actions)
    assert values.shape == (3, 4)
    for member in range(3):
        layers: list[nn.Module] = []
        for layer in critics.critic:
            if isinstance(layer, EnsembleLinear):
                plain = nn.Linear(layer.weight.shape[1], layer.weight.shape[2])
                plain.weight.data, plain.bias.data = layer.weight[member].T, layer.bias[member, 0]
                layers.append(plain)
            else:
                layers.append(nn.ReLU())
        alone = nn.Sequential(*layers)(torch.cat((inputs["states"], actions), dim=1))[:, 0]
        torch.testing.assert_close(values[member], alone)
    assert not torch.allclose(values[0], values[1])


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_critics_see_states_images_or_both(norm: Norm) -> None:
    for states in (0, 3):
        spec = EnvSpec(state_size=states, action_size=2, cameras={"main": (36, 40, 3)})
        critics = Critics(spec, 2, 8, layers=1, norm=norm)
        inputs = {"images.main": torch.randint(256, (4, 36, 40, 3), dtype=torch.uint8)}
        inputs |= {"states": torch.randn(4, states)} if states else {}
        values = critics(inputs, torch.randn(4, 2))
        assert values.shape == (2, 4)
        values.sum().backward()
        assert all(weight.grad is not None for weight in critics.parameters())


def test_keypoints_find_a_small_thing_of_its_own_colour() -> None:
    torch.manual_seed(0)
    spec = EnvSpec(state_size=3, action_size=2, cameras={"main": (16, 20, 3)})
    features, size = features_of(spec, 8, "keypoints")
    images = torch.full((2, 16, 20, 3), 180, dtype=torch.uint8)
    images[0, 15, 19] = images[1, 0, 0] = torch.tensor((20, 190, 60), dtype=torch.uint8)
    inputs = {"images.main": images, "states": torch.zeros(2, 3)}
    places = features(inputs)
    assert places.shape == (2, size)
    assert places[0].max() > 0.9
    assert places[1].min() < -0.9
    critics = Critics(spec, 2, 8, images="keypoints")
    critics(inputs, torch.zeros(2, 2)).sum().backward()
    assert all(weights.grad is not None for weights in critics.parameters())


@torch.no_grad()
def test_keypoints_of_many_images_are_those_of_each() -> None:
    torch.manual_seed(0)
    spec = EnvSpec(state_size=0, action_size=2, cameras={"main": (8, 10, 3)})
    features, _ = features_of(spec, 8, "keypoints")
    images = torch.randint(256, (70, 8, 10, 3), dtype=torch.uint8)
    places = features({"images.main": images})
    for first in (0, 32, 69):
        torch.testing.assert_close(features({"images.main": images[first : first + 1]})[0], places[first])
    assert features({"images.main": images[:0]}).shape == (0, places.shape[1])


@torch.no_grad()
def test_critics_take_features_that_were_computed_before() -> None:
    torch.manual_seed(0)
    critics = Critics(EnvSpec(state_size=3, action_size=2, cameras={"main": (16, 16, 3)}), 2, 8, judges_states=True)
    inputs = {"images.main": torch.randint(256, (4, 16, 16, 3), dtype=torch.uint8), "states": torch.randn(4, 3)}
    actions, encoded = torch.randn(4, 2), critics.encoded(inputs)
    values, of_states = critics(inputs, actions), critics.of_states(inputs)
    for weight in critics.features.parameters():
        weight.zero_()
    assert torch.equal(critics(encoded, actions), values)
    assert torch.equal(critics.of_states(encoded), of_states)
    assert not torch.equal(critics(inputs, actions), values)
    states = {"states": torch.randn(4, 5)}
    assert Critics(SPEC, 2, 8).encoded(states) is states


def test_layer_norm_bounds_values_of_actions_far_from_any_seen() -> None:
    """Ball et al. 2023: a layer norm bounds the value by the weights behind it, whatever the action."""
    torch.manual_seed(0)
    inputs, far = {"states": torch.zeros(1, 5)}, 1e4 * torch.ones(1, 2)
    plain, bounded = (Critics(SPEC, 2, 16, norm=norm)(inputs, far).abs().max() for norm in ("none", "layer"))
    assert plain > 10
    assert bounded < 10


def test_batch_renorm_starts_as_batch_norm() -> None:
    torch.manual_seed(0)
    layer = BatchRenorm(1, 3, warmup=100)
    for _ in range(100):
        batch = 2 + 3 * torch.randn(1, 64, 3)
        result = layer(batch)
        torch.testing.assert_close(result.mean(dim=1), torch.zeros(1, 3), atol=1e-5, rtol=0)
        torch.testing.assert_close(result.var(dim=1, correction=0), torch.ones(1, 3), atol=1e-3, rtol=0)
    # Afterwards a batch is normalized as in evaluation, within the bounds of the correction.
    batch = 2 + 3 * torch.randn(1, 64, 3)
    mean, deviation = layer.mean.clone(), layer.deviation.clone()
    torch.testing.assert_close(layer(batch), (batch - mean) / deviation, atol=1e-4, rtol=1e-4)
    layer.eval()
    torch.testing.assert_close(layer(batch), (batch - layer.mean) / layer.deviation)
