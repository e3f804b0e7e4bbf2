"""Policies of one's own whose weights torch does not count, and whose outputs have other shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recipes.embodied import FeaturePolicy
from recipes.embodied.config.model_config import policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.policy_precision import checked_evaluation, checked_output, checked_values
from recipes.embodied.models.registry import make_model
from rlinf_core import ConfigError

SPEC = EnvSpec(4, 2)
WIDTH = 8


class Own(FeaturePolicy):
    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec, width=WIDTH)
        self.trunk = nn.Sequential(nn.Linear(spec.state_size, WIDTH), nn.Tanh())

    def features(self, inputs: Any) -> torch.Tensor:
        return self.trunk(inputs["states"])


class Lazy(Own):
    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.trunk = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh())


class Listed(Own):
    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.layers = [nn.Linear(WIDTH, WIDTH)]


class ByName(Own):
    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.trunk.scales = {"all": nn.Parameter(torch.ones(WIDTH))}


class Plain(Own):
    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.scale = torch.ones(WIDTH, requires_grad=True)


class Sound(Own):
    """One that hides a frozen teacher from torch, and lists layers that torch knows."""

    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.teacher = [nn.Linear(WIDTH, WIDTH).requires_grad_(False)]
        self.first = [self.trunk[0]]
        self.mean = torch.zeros(4)


class Summed(Own):
    """One whose features are those of all observations together."""

    def features(self, inputs: Any) -> torch.Tensor:
        return super().features(inputs).sum(0, keepdim=True)


def made(class_: type[Own]) -> Any:
    return make_model(policy_model({"model_type": f"{__name__}:{class_.__name__}"}), SPEC)


@pytest.mark.parametrize(
    ("class_", "message"),
    [
        (Lazy, "`trunk.0.weight` of `Lazy` has no size yet"),
        (Listed, "`layers` of `Listed` is a list of layers or weights"),
        (ByName, "`trunk.scales` of `ByName` is a dict of layers or weights"),
        (Plain, "`scale` of `Plain` is a tensor with a gradient, and no parameter"),
    ],
)
def test_weights_that_torch_does_not_count_are_refused(class_: type[Own], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(class_)


def test_what_is_hidden_on_purpose_is_no_mistake() -> None:
    assert made(Sound).teacher


def test_outputs_of_other_shapes_are_refused() -> None:
    inputs = {"states": torch.randn(5, 4)}
    sound, wrong = made(Own), made(Summed)
    output = checked_output(sound.act(inputs), sound, 5, 1)
    assert checked_evaluation(sound(inputs, output.actions), sound, 5, 1).entropy.shape == (5, 1, 2)
    with pytest.raises(ConfigError, match=r"`act` of `Summed` returned `actions` of shape \[1, 1, 2\]"):
        checked_output(wrong.act(inputs), wrong, 5, 1)
    evaluated = sound(inputs, output.actions)
    for name, tensor in (("logprobs", evaluated.logprobs[:, 0]), ("entropy", evaluated.entropy[0])):
        fields = {"logprobs": evaluated.logprobs, "entropy": evaluated.entropy, "values": None, name: tensor}
        with pytest.raises(ConfigError, match=rf"`forward` of `Own` returned `{name}` of shape"):
            checked_evaluation(type(evaluated)(**fields), sound, 5, 1)
    values = type(evaluated)(evaluated.logprobs, evaluated.entropy, torch.zeros(5))
    with pytest.raises(ConfigError, match=r"`values` of `Own` returned `values` of shape \[5\]"):
        checked_values(torch.zeros(5), "values", sound, 5, 1)
    with pytest.raises(ConfigError, match=r"`forward` of `Own` returned `values` of shape \[5\]"):
        checked_evaluation(values, sound, 5, 1)
