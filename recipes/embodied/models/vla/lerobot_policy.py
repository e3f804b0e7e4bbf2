"""Any policy of lerobot, with its own loss, action selection and folder layout.

Actor and rollout workers run in an interpreter that has lerobot, by `python_interpreter_path` of their node group.
Rewards train the policies with a density of actions: for ACT, a normal distribution around its predicted chunk.
"""

# lerobot is largely untyped, and is not installed where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingImports=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import RANDOM_LEROBOT, LerobotOptions
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key, past_key
from recipes.embodied.models.base_policy import (
    ActionEval,
    BasePolicy,
    Inputs,
    PolicyOutput,
    value_head,
    with_value_head,
)
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import is_policy_folder
from recipes.embodied.models.published_statistics import load_statistics
from recipes.embodied.models.vla.lerobot_config import (
    ACTION,
    ENVIRONMENT_STATE,
    IMAGES,
    POSTPROCESSOR,
    PREPROCESSOR,
    STATE,
    cameras_of,
    check_sizes,
    is_steerable,
    make_processors,
    normalization_of,
    policy_config,
    reason_of,
    require_lerobot,
)
from recipes.training.arrays import Array
from recipes.training.without_memory import are_shapes_only
from rlinf_core import ConfigError

_PADDED: Final = "action_is_pad"
_LOG_SQRT_TAU = math.log(2 * math.pi) / 2
_SEEDS: Final = 2**31


class LerobotPolicy(BasePolicy):
    """A policy of lerobot. Its weights have lerobot's names, so that lerobot can load an export, too.

    Drawn actions are normalized, [n, C, A]. There is one value per chunk, V = 1.
    """

    options_model = LerobotOptions
    _without_greedy = "lerobot's own code chooses its actions"

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        require_lerobot()
        options = cast("LerobotOptions", config.options)
        if spec.num_choices is not None:
            raise ConfigError("`lerobot` predicts numbers, but the environment takes choices", help="use `mlp_policy`")
        folder = config.model_path
        self._shape = shape = policy_config(config, options, spec)
        check_sizes(shape, spec, folder)
        self._cameras = cameras_of(shape, options, spec)
        # In a list, since its parts are registered in this module under the same names.
        self._base = [_network(shape, folder)]
        for name, part in self._base[0].named_children():
            self.add_module(name, part)
        for name, weight in self._base[0].named_parameters(recurse=False):
            self.register_parameter(name, weight)
        self.horizon = len(shape.action_delta_indices)
        self.first_action = int(shape.action_delta_indices[0])
        self.observed_steps = int(shape.n_obs_steps)
        self._executed = config.num_action_chunks
        if is_steerable(shape):
            self.noise_shape = (self.horizon, spec.action_size)
        self.has_density = shape.type in RANDOM_LEROBOT
        self.log_std: nn.Parameter | None = None
        self.critic: nn.Module | None = None
        if self.has_density:
            self.log_std = nn.Parameter(torch.full((self._executed, spec.action_size), math.log(options.noise)))
            if config.add_value_head:
                self.critic = value_head(int(shape.dim_model), int(shape.dim_model))
        self._source = folder if folder and (Path(folder) / PREPROCESSOR).is_file() else None
        published = folder is not None and not is_policy_folder(folder)
        self.normalization = (
            load_statistics(str(folder), options.statistics, "lerobot", spec) if published else Normalization()
        )

    @property
    def base(self) -> Any:
        """The policy of lerobot."""
        return self._base[0]

    @property
    def normalization(self) -> Normalization:
        """Statistics of states and actions, shared with lerobot's processors."""
        return self._normalization

    @normalization.setter
    def normalization(self, normalization: Normalization) -> None:
        self._normalization = normalization
        self._processors = make_processors(self._shape, self._source, normalization)

    def normalization_of(self, states: Array | None, actions: Array) -> Normalization:
        """See `BasePolicy`: in the form of lerobot's configuration."""
        return normalization_of(self._shape, states, actions)

    def train(self, mode: bool = True) -> LerobotPolicy:
        """Set the mode of this policy and lerobot's."""
        self.base.train(mode)
        return super().train(mode)

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: the numeric output of lerobot's own processor."""
        batch: dict[str, Any] = {}
        for key, camera in self._cameras.items():
            pictures = torch.from_numpy(np.ascontiguousarray(self._in_a_row(observations, image_key(camera))))
            batch[key] = pictures.movedim(-1, -3).float() / 255
        for key, feature in (
            (STATE, self._shape.robot_state_feature),
            (ENVIRONMENT_STATE, self._shape.env_state_feature),
        ):
            if feature is not None:
                batch[key] = torch.from_numpy(np.asarray(self._in_a_row(observations, STATES), np.float32))
        count = len(next(iter(observations.values())))
        batch["task"] = observations[INSTRUCTIONS].tolist() if INSTRUCTIONS in observations else [""] * count
        device = next(self.parameters()).device
        made: dict[str, Any] = self._processors.before(batch)
        # A processor may add numbers other than observations, such as the `domain_id` of an X-VLA.
        return {
            name: values.to(device)
            for name, values in made.items()
            if isinstance(values, Tensor) and values.shape[:1] == (count,) and name != ACTION
        }

    def to_env(self, actions: Tensor) -> Array:
        """See `BasePolicy`: by lerobot's own processor."""
        rows = self._processors.after(actions.detach().float().cpu().flatten(0, 1))
        return rows.view(actions.shape).numpy().astype(np.float32)

    def from_env(self, actions: Array) -> Tensor:
        return super().from_env(self.normalization.normalized_actions(actions).astype(np.float32))

    def imitation_loss(self, inputs: Inputs, actions: Tensor, valid: Tensor) -> Tensor:
        """See `BasePolicy`: lerobot's own loss, which itself handles actions after the end."""
        self.train()
        batch = dict(inputs)
        if self._shape.observation_delta_indices is not None and self.observed_steps == 1:
            batch = {name: values[:, None] if _is_seen(name) else values for name, values in batch.items()}
        loss, _ = self.base.forward({**batch, ACTION: actions, _PADDED: ~valid})
        return loss

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        """See `BasePolicy`. For greedy actions that are a function of noise, the noise is 0, as in `FlowPolicy`.

        Other policies that draw by themselves get a seed from `generator`; for greedy actions always the same.
        """
        if greedy and self.noise_shape is not None:
            number = len(next(iter(inputs.values())))
            zero = torch.zeros(number, *self.noise_shape, device=_device(inputs))
            return PolicyOutput(self.from_noise(inputs, zero), None, None)
        if not self.has_density:
            seed = 0 if greedy else int(torch.randint(_SEEDS, (), generator=generator, device=_place(generator)))
            return PolicyOutput(self._selected(inputs, seed), None, None)
        mean, values = self._predicted(inputs)
        noise = torch.zeros_like(mean)
        if not greedy:
            noise.normal_(generator=generator)
        deviation = cast("Tensor", self.log_std)
        logprobs = -noise.square() / 2 - deviation - _LOG_SQRT_TAU
        return PolicyOutput(mean + deviation.exp() * noise, logprobs, values)

    @torch.no_grad()
    def from_noise(self, inputs: Inputs, noise: Tensor) -> Tensor:
        return self._selected(inputs, 0, noise=noise)

    @torch.no_grad()
    def predicted(self, inputs: Inputs) -> Tensor:
        """See `BasePolicy`: the whole chunk for ACT, otherwise the executed part."""
        return self._chunk(inputs)[0] if self.has_density else super().predicted(inputs)

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        mean, values = self._predicted(inputs)
        deviation = cast("Tensor", self.log_std)
        away = (actions - mean) * (-deviation).exp()
        entropy = (0.5 + _LOG_SQRT_TAU + deviation).expand_as(actions)
        return ActionEval(-away.square() / 2 - deviation - _LOG_SQRT_TAU, entropy, values)

    @torch.no_grad()
    def values(self, inputs: Inputs) -> Tensor:
        return with_value_head(self._predicted(inputs)[1] if self.has_density else None)

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: configuration and processors, so that lerobot can load the folder, too."""
        self._shape._save_pretrained(folder)
        self._processors.before.save_pretrained(folder, config_filename=PREPROCESSOR)
        self._processors.after.save_pretrained(folder, config_filename=POSTPROCESSOR)

    def _in_a_row(self, observations: Observation, name: str) -> Array:
        """Return observations [n, ...], or [n, T, ...] for a policy that acts on several in a row.

        Raises:
            ConfigError: the earlier observations are missing.
        """
        present = observations[name]
        if self.observed_steps == 1:
            return present
        past = observations.get(past_key(name))
        if past is None or past.shape[1] != self.observed_steps - 1:
            steps = self.observed_steps
            raise ConfigError(
                f"the policy acts by {steps} observations in a row, and earlier ones are missing",
                why=f"`{past_key(name)}` holds {0 if past is None else past.shape[1]} steps of {steps - 1}",
                help=f"write `actor.model.options.config: {{n_obs_steps: {steps}}}`: env workers on another machine do"
                " not see the policy's folder",
            )
        return np.concatenate((past, present[:, None]), axis=1)

    def _selected(self, inputs: Inputs, seed: int, **options: Tensor) -> Tensor:
        """Return the actions [n, C, A] that lerobot selects one by one, from a single observation."""
        base = self.base
        self.eval()
        with torch.random.fork_rng(devices=[_device(inputs)] if _device(inputs).type == "cuda" else []):
            base.reset()
            batch = dict(inputs)
            for step in range(self.observed_steps - 1):
                # While an action is queued, it accepts an observation without predicting.
                base._queues[ACTION].append(torch.zeros(()))
                base.select_action(self._at(batch, step))
            torch.manual_seed(seed)
            batch = self._at(batch, -1)
            return torch.stack([base.select_action(dict(batch), **options) for _ in range(self._executed)], dim=1)

    def _at(self, inputs: Inputs, step: int) -> Inputs:
        if self.observed_steps == 1:
            return inputs
        return {name: values[:, step] if _is_seen(name) else values for name, values in inputs.items()}

    def _predicted(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return the mean [n, C, A] of an ACT's executed actions, and values; see `_chunk`."""
        chunk, values = self._chunk(inputs)
        return chunk[:, : self._executed], values

    def _chunk(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return the chunk [n, H, A] of an ACT, and the values [n, 1] from its encoder's output.

        Dropout is off, so that log-probabilities of equal actions are equal.
        """
        self.eval()
        batch: dict[str, Any] = dict(inputs)
        if self._shape.image_features:
            batch[IMAGES] = [batch[key] for key in self._shape.image_features]
        encoded: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            encoded.append(output)

        handle = self.base.model.encoder.register_forward_hook(keep)
        try:
            chunk = self.base.model(batch)[0]
        finally:
            handle.remove()
        values = None if self.critic is None else self.critic(encoded[0].mean(dim=0))
        return chunk, values


def _network(shape: Any, folder: str | None) -> Any:
    """Return lerobot's policy with the weights of its folder; weights in a folder of `save_policy` are loaded later.

    Raises:
        ConfigError: the weights are of another policy, or lerobot cannot make this type here.
    """
    from lerobot.policies.factory import get_policy_class

    try:
        kind = get_policy_class(shape.type)
        if folder is None or are_shapes_only() or is_policy_folder(folder):
            return kind(shape)
        return kind.from_pretrained(folder, config=shape, local_files_only=True, strict=True)
    except Exception as error:  # noqa: BLE001 - of the hub, safetensors, torch, and of each policy
        raise ConfigError(
            f"lerobot cannot make a `{shape.type}`" + (f" of `{folder}`" if folder else ""),
            why=reason_of(error),
            help="nothing is downloaded: models and tokenizers that its configuration names must be folders"
            " (docs/models.md)",
        ) from None


def _is_seen(name: str) -> bool:
    """Return whether lerobot's data sets have a value for each observed step."""
    return name.startswith((IMAGES, "observation.image", STATE, ENVIRONMENT_STATE))


def _device(inputs: Inputs) -> torch.device:
    return next(iter(inputs.values())).device


def _place(generator: torch.Generator | None) -> torch.device | None:
    return None if generator is None else generator.device
