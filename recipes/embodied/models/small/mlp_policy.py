"""A policy on states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.models.heads import hidden_layers
from recipes.embodied.models.small.feature_policy import SeparateNetworks
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig


class MlpPolicy(SeparateNetworks):
    """Two hidden layers of `hidden_dim` each, for actions and for values."""

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        if not spec.state_size:
            raise ConfigError("`mlp_policy` needs states, but the environment has images", help="use `cnn_policy`")
        width = config.hidden_dim
        networks = (hidden_layers(spec.state_size, width) for _ in range(2))
        super().__init__(config, spec, next(networks), next(networks), width)
