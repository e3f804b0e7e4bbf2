"""Stand-ins for a rehearsal: environments and policies that do nothing, with messages of the real size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation, Transition
from recipes.embodied.models.base_policy import Inputs
from recipes.embodied.models.feature_policy import FeaturePolicy

if TYPE_CHECKING:
    from recipes.embodied.config import EmbodiedModelConfig

_WIDTH = 8
_INSTRUCTION = "a task in words of about this length"


class StandInEnv(VectorEnv):
    """Environments that never change; their option `spec` holds the fields of an `EnvSpec`."""

    def __init__(self, settings: EnvSettings) -> None:
        super().__init__(settings)
        options: Any = settings.options
        self._spec = EnvSpec.of_plain(options["spec"])
        rows = {name: ((self.num_envs, *shape), kind) for name, (shape, kind) in self._spec.observations.items()}
        self._observed: Observation = {
            name: np.full(shape, _INSTRUCTION) if kind == "U" else np.zeros(shape, kind)
            for name, (shape, kind) in rows.items()
        }

    @property
    def spec(self) -> EnvSpec:
        """See `TaskMethods`."""
        return self._spec

    def _start(self, rows: Any, starts: Any) -> None:
        """Do nothing."""

    def _advance(self, actions: Any, rows: Any) -> Transition:
        none = np.zeros(self.num_envs, np.bool_)
        # Rewards differ so that advantages do.
        return Transition(np.square(actions.reshape(self.num_envs, -1)[:, 0]).astype(np.float32), none, None, none)

    def _observe(self) -> Observation:
        return {name: values.copy() for name, values in self._observed.items()}


class StandInOptions(BaseModel):
    """Options of `StandInPolicy`: the number of extra weights, so that as much is sent as for the real policy."""

    model_config = ConfigDict(extra="forbid")

    numbers: int = 0


class StandInPolicy(FeaturePolicy):
    """A policy that ignores its inputs and has as many weights as another policy."""

    options_model: ClassVar[type[BaseModel]] = StandInOptions

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, _WIDTH)
        self.base = nn.Parameter(torch.zeros(_WIDTH))
        options: Any = config.options
        self.ballast = nn.Parameter(torch.zeros(max(1, options.numbers)), requires_grad=False)

    def features(self, inputs: Inputs) -> Tensor:
        """See `FeaturePolicy`."""
        return self.base.expand(len(next(iter(inputs.values()))), _WIDTH)
