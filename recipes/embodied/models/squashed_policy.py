"""The policies of off-policy learning: normal distributions squashed by tanh, on states or images.

`SteeredPolicy` chooses the initial noise of a frozen diffusion or flow-matching policy. DSRL, Wagenmaker et al. 2025,
"Steering your diffusion policy with latent space reinforcement learning" (arXiv 2506.15799): the frozen policy is a
function from an observation and noise to actions, so that noise is the action of a derived task, which soft
actor-critic learns. The frozen policy is not differentiated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from torch import Tensor, nn
from torch.nn import functional

from recipes.embodied.config import EmbodiedModelConfig
from recipes.embodied.config.model_config import CONVOLUTIONS, ImageFeatures, SquashedOptions, SteeredOptions
from recipes.embodied.envs.env_spec import EnvSpec, ImageShape, Observation
from recipes.embodied.envs.observation_keys import STATES, image_key
from recipes.embodied.models.base_policy import ActionEval, BasePolicy, Inputs, PolicyOutput
from recipes.embodied.models.feature_policy import ImageEncoder
from recipes.embodied.models.folder_facts import FROZEN, frozen_section, saved_type
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.registry import built_policy, make_model
from recipes.training.arrays import Array
from rlinf_core import ConfigError

KEYPOINTS: Final = 8  # in the images of one camera
_WIDTH: Final = 16
_SHARPNESS: Final = 3.0
_CACHED: Final = 32  # images
_EPSILON: Final = 1e-6  # added to a variance


class ColourKeypoints(nn.Module):
    """The mean positions of `KEYPOINTS` learned colors in an image: a spatial softmax (Levine et al. 2016, arXiv
    1504.00702) over per-pixel scores, normalized over the image, so that small objects of distinct color stand out
    before learning.
    """

    places: Tensor

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        height, width, channels = shape
        self.hidden = nn.Linear(channels, _WIDTH)
        self.scores = nn.Linear(_WIDTH, KEYPOINTS, bias=False)  # normalization would cancel a bias
        self.sharpness = nn.Parameter(torch.tensor(_SHARPNESS))
        rows, columns = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
        self.register_buffer("places", torch.stack((rows, columns), dim=-1).flatten(0, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return rows and columns from -1 to 1, [n, 2 * KEYPOINTS], of uint8 [n, H, W, channels]."""
        traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - public, and left out of a list
        if images.device.type != "cpu" or traced or torch.compiler.is_compiling():
            # An exported graph must take any number of images.
            return self._keypoints(images)
        # On a CPU, parts that fit into the cache are faster than the whole.
        return torch.cat([self._keypoints(part) for part in torch.split(images, _CACHED)])

    def _keypoints(self, images: Tensor) -> Tensor:
        count, weight = images.shape[0], self.hidden.weight
        # Pixels are columns, so that reductions over an image run along rows. The linear layer also scales pixels to
        # -0.5 to 0.5, since each separate operation would take as long as the layer.
        pixels = images.flatten(0, 2).t().to(weight.dtype, memory_format=torch.contiguous_format)
        bias = self.hidden.bias - weight.sum(dim=1) / 2
        hidden = torch.addmm(bias[:, None], weight / 255, pixels).relu()
        scores = (self.scores.weight @ hidden).view(KEYPOINTS, count, len(self.places))
        size = scores.shape[-1:]
        sharp = functional.layer_norm(scores, size, self.sharpness.expand(size), eps=_EPSILON)
        return (sharp.softmax(dim=2) @ self.places).transpose(0, 1).flatten(1)


class KeypointEncoder(nn.Module):
    """The keypoints of all cameras and the states, as features.

    Attributes:
        size: F, the number of features.
    """

    def __init__(self, cameras: Mapping[str, ImageShape], state_size: int) -> None:
        super().__init__()
        self.keys = [image_key(camera) for camera in cameras]
        self.cameras = nn.ModuleList(ColourKeypoints(shape) for shape in cameras.values())
        self.state_size = state_size
        self.size = 2 * KEYPOINTS * len(self.keys) + state_size

    def forward(self, inputs: Inputs) -> Tensor:
        """Return features [n, F] of `images.CAMERA` uint8 [n, H, W, channels] and of `states` float32 [n, S]."""
        features = [network(inputs[key]) for key, network in zip(self.keys, self.cameras, strict=True)]
        return torch.cat([*features, *([inputs[STATES]] if self.state_size else [])], dim=1)


# The name, among inputs, of features that have already been computed from images and states.
FEATURES: Final = "features"
LOG_STD_MIN: Final = -20.0
LOG_STD_MAX: Final = 2.0
_LOG_SQRT_TAU: Final = math.log(2 * math.pi) / 2
# The largest action whose inverse tanh is taken: float32 rounds larger ones to 1.
_LARGEST: Final = 1 - 1e-6


def with_scaled_states(normalization: Normalization, inputs: Inputs) -> Inputs:
    """Return inputs with normalized states; without statistics the inputs themselves."""
    if normalization.states is None or STATES not in inputs:
        return inputs
    return {**inputs, STATES: normalization.normalized_states(inputs[STATES])}


def features_from(network: nn.Module, normalization: Normalization, inputs: Inputs) -> Tensor:
    """Return the features of inputs, [n, F]: those already in them, else the output of a network."""
    if FEATURES in inputs:
        return inputs[FEATURES]
    return network(with_scaled_states(normalization, inputs))


class StateFeatures(nn.Module):
    """The states themselves, as features."""

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the states, [n, S]."""
        return inputs[STATES]


def image_features(config: EmbodiedModelConfig) -> ImageFeatures:
    """Return how a policy of off-policy learning, and its critics, encode images."""
    if config.model_type != "squashed_policy":
        return CONVOLUTIONS
    return SquashedOptions.model_validate(config.options).images


def features_of(spec: EnvSpec, width: int, images: ImageFeatures = CONVOLUTIONS) -> tuple[nn.Module, int]:
    """Return a network from `inputs` to features [n, F], and F: of images and states, or of states alone.

    Raises:
        ConfigError: there are neither images nor states.
    """
    if spec.cameras:
        if images == "keypoints":
            keypoints = KeypointEncoder(spec.cameras, spec.state_size)
            return keypoints, keypoints.size
        return ImageEncoder(spec.cameras, spec.state_size, width), width
    if not spec.state_size:
        raise ConfigError("`squashed_policy` needs states or images, but the environment has none")
    return StateFeatures(), spec.state_size


def relu_layers(inputs: int, width: int, count: int) -> nn.Sequential:
    """Return hidden ReLU layers with torch's default initial weights."""
    layers: list[nn.Module] = []
    for number in range(count):
        layers += [nn.Linear(width if number else inputs, width), nn.ReLU()]
    return nn.Sequential(*layers)


class SquashedPolicy(BasePolicy):
    """A policy with actions tanh(u), where u is normal with mean and std from the observation.

    Evaluations use the tanh of the mean as the likeliest action. With `exploration_noise`, actions are that plus noise
    of fixed std, clipped to -1 to 1. There is no value head: critics belong to the actor worker.
    """

    loads_model_path: ClassVar[bool] = False
    normalizes_states: ClassVar[bool] = True
    options_model: ClassVar[type[BaseModel]] = SquashedOptions

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        super().__init__()
        if spec.num_choices is not None:
            raise ConfigError(
                "`squashed_policy` has continuous actions, but the environment takes discrete ones",
                help="use `mlp_policy` and PPO",
            )
        if config.num_action_chunks != 1:
            raise ConfigError("`squashed_policy` predicts one action at a time", help="remove `num_action_chunks`")
        options = cast("SquashedOptions", config.options)
        self.action_size = spec.action_size
        self.noise = options.exploration_noise
        self.features, size = features_of(spec, config.hidden_dim, options.images)
        self.layers = relu_layers(size, config.hidden_dim, options.num_layers)
        self.mean = nn.Linear(config.hidden_dim, spec.action_size)
        self.log_std = None if self.noise is not None else nn.Linear(config.hidden_dim, spec.action_size)

    @property
    def scaling(self) -> Normalization:
        """The normalization of states within the network and the critics: a replay buffer holds raw states."""
        return self.normalization

    def normalization_of(self, states: Array | None, actions: Array) -> Normalization | None:
        """See `BasePolicy`: demonstrated states are not normalized, and actions are already from -1 to 1."""
        return Normalization()

    def distribution(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return mean and logarithm of the std of u, [n, A]; None for the latter if the noise is fixed."""
        hidden = self.layers(features_from(self.features, self.scaling, inputs))
        if self.log_std is None:
            return self.mean(hidden), None
        return self.mean(hidden), self.log_std(hidden).clamp(LOG_STD_MIN, LOG_STD_MAX)

    def sample(self, inputs: Inputs, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor | None]:
        """Draw actions [n, A] and their log-probabilities [n], with gradients (SAC's reparametrization).

        Returns:
            With fixed noise, the likeliest actions and None: TD3 learns from actions without noise.
        """
        mean, log_std = self.distribution(inputs)
        if log_std is None:
            return mean.tanh(), None
        noise = torch.empty_like(mean).normal_(generator=generator)
        u = mean + log_std.exp() * noise
        return u.tanh(), (-noise.square() / 2 - log_std - _LOG_SQRT_TAU - _log_slope(u)).sum(dim=-1)

    def random(self, inputs: Inputs) -> PolicyOutput:
        """Return actions independent of weights, for the start of a run: uniform from -1 to 1."""
        like = next(iter(inputs.values()))
        drawn = torch.rand(len(like), 1, self.action_size, device=like.device) * 2 - 1
        return PolicyOutput(drawn, torch.zeros_like(drawn), None)

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        mean, log_std = self.distribution(inputs)
        if greedy:
            return PolicyOutput(mean.tanh()[:, None], torch.zeros_like(mean)[:, None], None)
        noise = torch.empty_like(mean).normal_(generator=generator)
        if log_std is None:
            noisy = mean.tanh() + (self.noise or 0) * noise
            return PolicyOutput(noisy.clamp(-1, 1)[:, None], torch.zeros_like(mean)[:, None], None)
        u = mean + log_std.exp() * noise
        logprobs = -noise.square() / 2 - log_std - _LOG_SQRT_TAU - _log_slope(u)
        return PolicyOutput(u.tanh()[:, None], logprobs[:, None], None)

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`; the entropy, which has no closed form, is estimated from the given actions.

        With fixed noise the distribution is a normal one around the likeliest action.
        """
        mean, log_std = self.distribution(inputs)
        taken = actions[:, 0]
        if log_std is None:
            deviation = self.noise or 1.0
            away = (taken - mean.tanh()) / deviation
            logprobs = -away.square() / 2 - math.log(deviation) - _LOG_SQRT_TAU
        else:
            u = taken.clamp(-_LARGEST, _LARGEST).atanh()
            away = (u - mean) * (-log_std).exp()
            logprobs = -away.square() / 2 - log_std - _LOG_SQRT_TAU - _log_slope(u)
        return ActionEval(logprobs[:, None], -logprobs.detach()[:, None], None)

    def values(self, inputs: Inputs) -> Tensor:
        raise ValueError("`squashed_policy` has no value head")

    def greedy(self, observations: Inputs) -> Tensor:
        return self.distribution(observations)[0].tanh()[:, None]


def _log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2), exact where tanh is 1 in float32 (SAC, appendix C)."""
    return 2 * (math.log(2) - u - functional.softplus(-2 * u))


# The prefix, among the inputs, of names of the frozen policy's inputs.
_OF_FROZEN: Final = "frozen/"


class SteeredPolicy(SquashedPolicy):
    """A policy of noise b * tanh(u) with W numbers, where u is normal, and of the frozen policy's actions for it.

    A drawn action is the noise, in units of the bound b, followed by the environment's actions: [n, 1, W + C * A].
    Evaluations use the likeliest noise.

    Attributes:
        frozen: the policy that is steered, without gradients.
        action_size: W, the size of the noise.
    """

    loads_policies: ClassVar[bool] = True
    options_model = SteeredOptions

    def __init__(self, config: EmbodiedModelConfig, spec: EnvSpec) -> None:
        options = cast("SteeredOptions", config.options)
        section = frozen_section(config)
        if saved_type(config.model_path) == config.model_type:
            # The folder holds the weights of both policies, which are loaded together.
            frozen = built_policy(section, spec)
        else:
            frozen = make_model(section, spec)
        if frozen.noise_shape is None:
            raise not_steerable(section)
        steps, width = frozen.noise_shape
        size = width if options.repeats_noise else steps * width
        own = SquashedOptions(num_layers=options.num_layers)
        small = config.model_copy(update={"options": own, "num_action_chunks": 1})
        super().__init__(small, replace(spec, action_size=size, low=None, high=None))
        self.frozen = frozen.requires_grad_(False).eval()
        self.observed_steps = frozen.observed_steps
        self._section, self._options = section, options
        self._noise = (1 if options.repeats_noise else steps, width)
        self._carried_out = (config.num_action_chunks, spec.action_size)
        self._observed = frozenset(spec.observations)

    @property
    def normalization(self) -> Normalization:
        """The normalization of the frozen policy; the small policy takes raw observations."""
        return self.frozen.normalization

    @normalization.setter
    def normalization(self, normalization: Normalization) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.frozen.normalization = normalization

    @property
    def scaling(self) -> Normalization:
        """No normalization: noise is chosen from raw observations."""
        return Normalization()

    def normalization_of(self, states: Array | None, actions: Array) -> Normalization | None:
        """See `BasePolicy`; the frozen policy's."""
        return self.frozen.normalization_of(states, actions)

    def train(self, mode: bool = True) -> SteeredPolicy:
        """Set the mode of what is trained."""
        super().train(mode)
        self.frozen.eval()
        return self

    def prepare(self, observations: Observation) -> Inputs:
        """See `BasePolicy`: raw observations, and the inputs of the frozen policy."""
        frozen = {f"{_OF_FROZEN}{name}": tensor for name, tensor in self.frozen.prepare(observations).items()}
        return self.recorded(super().prepare(observations)) | frozen

    def recorded(self, inputs: Inputs) -> Inputs:
        """See `BasePolicy`: the current observations."""
        return {name: tensor for name, tensor in inputs.items() if name in self._observed}

    @torch.no_grad()
    def act(self, inputs: Inputs, *, greedy: bool = False, generator: torch.Generator | None = None) -> PolicyOutput:
        output = super().act(inputs, greedy=greedy, generator=generator)
        return self._steered(inputs, output.actions[:, 0], output.logprobs)

    @torch.no_grad()
    def random(self, inputs: Inputs) -> PolicyOutput:
        """See `SquashedPolicy`: actions of the frozen policy for normal noise within the bound."""
        noise = self.standard_noise(next(iter(inputs.values())))
        return self._steered(inputs, noise, torch.zeros_like(noise)[:, None])

    def forward(self, inputs: Inputs, actions: Tensor) -> ActionEval:
        """See `BasePolicy`: evaluates the noise."""
        return super().forward(inputs, actions[..., : self.action_size])

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        return actions[:, 0, self.action_size :].reshape(-1, *self._carried_out).cpu().numpy()

    def greedy(self, observations: Inputs) -> Tensor:
        """Refuse, see `BasePolicy`."""
        return BasePolicy.greedy(self, observations)

    def describe_images(self) -> dict[str, Any]:
        return self.frozen.describe_images()

    def save_files(self, folder: Path) -> None:
        """See `BasePolicy`: those of the frozen policy, and its section of the configuration."""
        self.frozen.save_files(folder)
        section = self._section.model_dump(mode="json", exclude={"model_path"})
        (folder / FROZEN).write_text(json.dumps(section, indent=1) + "\n")

    @torch.no_grad()
    def carried_out(self, inputs: Inputs, noise: Tensor) -> Tensor:
        """Return the environment's actions, float32 [n, C * A], for noise [n, W].

        Args:
            inputs: the inputs of `prepare`.
            noise: noise in units of the bound, from -1 to 1.
        """
        steps, width = cast("tuple[int, int]", self.frozen.noise_shape)
        first = (noise * self._options.noise_bound).view(-1, *self._noise).expand(-1, steps, width)
        own = {name.removeprefix(_OF_FROZEN): inputs[name] for name in inputs if name.startswith(_OF_FROZEN)}
        actions = torch.from_numpy(self.frozen.to_env(self.frozen.from_noise(own, first.contiguous())))
        return actions.flatten(1).to(noise)

    def standard_noise(self, like: Tensor) -> Tensor:
        """Return normal noise [n, W], as in the frozen policy's training, in the units of `carried_out`; n and the
        device are those of `like`.
        """
        drawn = torch.randn(len(like), self.action_size, device=like.device)
        return (drawn / self._options.noise_bound).clamp(-1, 1)

    def _steered(self, inputs: Inputs, noise: Tensor, logprobs: Tensor | None) -> PolicyOutput:
        """Return noise [n, W] with its actions."""
        return PolicyOutput(torch.cat((noise, self.carried_out(inputs, noise)), dim=1)[:, None], logprobs, None)


def not_steerable(section: EmbodiedModelConfig) -> ConfigError:
    """Return the error about a policy whose actions are no function of selectable noise."""
    return ConfigError(
        f"a `{section.model_type}` cannot be steered: its actions do not come from noise alone",
        where="actor.model.model_path",
        help="name a policy by flow matching (`flow_policy`, `pi0`, `pi05`, `smolvla`), or a diffusion policy of"
        " lerobot, with `options: {policy: {options: {config: {noise_scheduler_type: DDIM}}}}`",
    )
