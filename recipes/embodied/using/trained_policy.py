"""Trained policies apart from runs: `load_policy` returns one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from recipes.embodied.config import PolicyJob
from recipes.embodied.config.model_config import EmbodiedModelConfig, policy_model
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import past_key
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.policy_folder import DESCRIPTION, is_policy_folder, load_trained, read_description
from recipes.embodied.models.registry import make_model
from recipes.training.arrays import Array, all_finite
from recipes.training.seeding import Purpose, derive_seed
from rlinf_core import ConfigError
from rlinf_core.config.validating.validation_messages import refusals


class TrainedPolicy:
    """A policy with its weights, ready to act.

    Args:
        module: the policy.
        spec: the spec of the observations and actions that it was trained with.

    Attributes:
        module: the torch module, for uses other than acting.
        spec: the spec of observations and actions.
    """

    def __init__(self, module: BasePolicy, spec: EnvSpec) -> None:
        self.module = module.eval()
        self.spec = spec

    @property
    def observations(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """The observations that `act` takes, as in `EnvSpec`; for a policy that acts on T consecutive ones also
        `past.NAME`, the
        T - 1 earlier ones, oldest first.
        """
        present = self.spec.observations
        if self.module.observed_steps == 1:
            return present
        before = self.module.observed_steps - 1
        return present | {
            past_key(name): ((before, *row), kind) for name, (row, kind) in present.items() if kind != "U"
        }

    def act(
        self, observations: Mapping[str, Any], *, greedy: bool = True, generator: torch.Generator | None = None
    ) -> Array:
        """Return chunks of actions for n observations, [n, C, A], in the environment's range from -1 to 1.

        Dimensions without bounds (`spec.bounded`) are not clipped.

        Args:
            observations: `states` [n, S], `images.CAMERA` uint8 [n, H, W, 3], `instructions` n texts: those that
                `observations` lists.
            greedy: whether to take the likeliest actions rather than draw them.
            generator: source of randomness; None: torch's own.

        Raises:
            ConfigError: an observation is missing, has another shape or type, or is not finite.
        """
        inputs = self.module.prepare(self._checked(observations))
        with torch.inference_mode():
            output = self.module.act(inputs, greedy=greedy, generator=generator)
        return self.spec.carried_out(self.module.to_env(output.actions))

    def _checked(self, observations: Mapping[str, Any]) -> dict[str, Array]:
        checked: dict[str, Array] = {}
        expected = self.observations
        for name, (shape, kind) in expected.items():
            if name not in observations and kind == "U" and not hasattr(self.module, "tokenizer"):
                continue  # a policy that reads no instructions
            if name not in observations:
                listed = ", ".join(f"`{observation}`" for observation in expected)
                raise ConfigError(f"the observation `{name}` is missing", help=f"the policy was trained with {listed}")
            array = np.asarray(observations[name])
            if kind == "float32" and array.dtype.kind in "fiub":
                array = array.astype(np.float32)
            is_row = array.ndim == 1 + len(shape) and array.shape[1:] == shape
            if not is_row or kind not in (array.dtype.name, array.dtype.kind) or not all_finite(array):
                raise ConfigError(
                    f"the observation `{name}` is {array.dtype} {list(array.shape)}"
                    + ("" if all_finite(array) else ", and not finite"),
                    help="the policy was trained with"
                    f" {'text' if kind == 'U' else kind} [n, {', '.join(map(str, shape))}]".replace(", ]", "]"),
                )
            checked[name] = array
        if len({len(array) for array in checked.values()}) > 1:
            raise ConfigError("the observations cover different numbers of environments")
        return checked


def load(folder: Path, config: PolicyJob | None, device: str = "cpu") -> TrainedPolicy:
    """Return the policy of a checkpoint, or of a folder that `rlinf export --format safetensors` wrote.

    Args:
        folder: a checkpoint `global_step_N`, or an exported folder.
        config: the configuration of the checkpoint's run; None: the description in the folder.
        device: the device of the policy, in torch's notation.

    Raises:
        CheckpointError: the weights cannot be read.
        ConfigError: the folder holds no policy, or lacks statistics.
    """
    data, spec = read_description(folder)
    if is_policy_folder(str(folder)):
        model = _section(folder, {**data, "model_path": str(folder)})
        return TrainedPolicy(make_model(model, spec).to(device), spec)
    model = _section(folder, data) if config is None else config.actor.model
    with torch.random.fork_rng(devices=[]):
        if config is not None:
            # Weights that neither a folder nor the checkpoint has are initialized as by the actor.
            torch.manual_seed(derive_seed(config.actor.seed, Purpose.WEIGHTS))
        policy = make_model(model, spec)
    load_trained(policy, model, spec, str(folder))
    return TrainedPolicy(policy.to(device), spec)


def _section(folder: Path, data: Mapping[str, Any]) -> EmbodiedModelConfig:
    """Return the section `actor.model` that a folder describes.

    Raises:
        ConfigError: a key or its value is wrong.
    """
    try:
        return policy_model({}, data, str(folder / DESCRIPTION))
    except ValidationError as error:
        raise ConfigError(
            f"`{folder / DESCRIPTION}` is invalid",
            why=refusals(error, "model")[0],
            help="copy the folder again, or correct the key",
        ) from None
