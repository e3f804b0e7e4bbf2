"""Policies by `actor.model.model_type`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_core import checked_options
from rlinf_core.registry import Registry

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig
    from recipes.embodied.envs.types import EnvSpec
    from recipes.embodied.models.base import BasePolicy

_MODELS: Registry[type[BasePolicy]] = Registry(
    "model_type",
    {
        "mlp_policy": "recipes.embodied.models.mlp_policy:MlpPolicy",
        "cnn_policy": "recipes.embodied.models.cnn_policy:CnnPolicy",
    },
)
register_model = _MODELS.register


def make_model(config: EmbodiedModelConfig, spec: EnvSpec) -> BasePolicy:
    """Return a policy with fresh weights, in fp32 on the CPU.

    Args:
        config: the section `actor.model`.
        spec: of the environment that it acts in.

    Raises:
        ConfigError: there is no such model, or it does not fit the environment.
    """
    class_ = _MODELS.get(config.model_type)
    options = checked_options(class_, config.options, "actor.model.options")
    return class_(config.model_copy(update={"options": options}), spec)
