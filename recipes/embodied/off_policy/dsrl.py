"""DSRL, which steers a frozen policy by its initial noise.

Wagenmaker et al. 2025, "Steering your diffusion policy with latent space reinforcement learning" (arXiv 2506.15799):
SAC on noise (DSRL-SAC), or noise aliasing (section 4.3, DSRL-NA), which learns values of the resulting actions, and
from these values of noise: different noise may give the same actions, whose value is then learned only once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field

from recipes.embodied.config.algorithm_config import OF_ALGORITHM, LossName
from recipes.embodied.off_policy.algorithm import CRITIC, LOSS, TransitionTensors, trained
from recipes.embodied.off_policy.sac import Sac, SacOptions, SacSettings, reduced
from recipes.sections.checks import Report, blame
from rlinf_core import ConfigError
from rlinf_core.config.tree import Path
from rlinf_core.scalars import Bool

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.embodied.config import EmbodiedConfig, EmbodiedModelConfig
    from recipes.embodied.envs.env_spec import EnvSpec, Observation
    from recipes.embodied.models.base_policy import Inputs
    from recipes.embodied.models.critics import Critics
    from recipes.embodied.models.squashed_policy import SteeredPolicy
    from recipes.training.updater import Figures
    from recipes.training.weights.training_state import TrainingState
    from rlinf_core import Loss

# The name of the weights of critics of noise in a checkpoint.
NOISE_CRITIC: Final = "noise_critic"
# Policies by flow matching or diffusion, whose noise can be chosen; and those that read an instruction.
_STEERABLE: Final = ("flow_policy", "pi0", "pi05", "smolvla", "lerobot")
_READERS: Final = ("pi0", "pi05", "smolvla")
_FOLDER: Final[Path] = ("actor", "model", "model_path")


class DsrlOptions(SacOptions):
    """Options of DSRL."""

    noise_aliasing: Bool = Field(
        default=False,
        description="Learn values of actions, and of noise from those (DSRL-NA): fewer steps,"
        " but every update runs the frozen policy twice. Else values of noise alone (DSRL-SAC).",
    )


class DsrlSettings(SacSettings):
    """The keys of DSRL."""

    loss_type: LossName = "dsrl"
    options: DsrlOptions = Field(default_factory=DsrlOptions, description=OF_ALGORITHM)


class Dsrl(Sac[DsrlSettings]):
    """DSRL. With noise aliasing there are critics of actions [n, C * A], and separate ones of noise [n, W]."""

    settings_model = DsrlSettings
    policy_type = "steered_policy"
    learns_drawn_actions = True

    policy: SteeredPolicy

    def __init__(
        self, settings: DsrlSettings, policy: TrainingState, critics: Mapping[str, TrainingState], **named: Any
    ) -> None:
        from recipes.embodied.models.critics import Critics
        from recipes.embodied.models.squashed_policy import SteeredPolicy

        trained(policy, SteeredPolicy)
        super().__init__(settings, policy, critics, **named)
        self._noise_critics = trained(critics[NOISE_CRITIC], Critics) if NOISE_CRITIC in critics else None

    @classmethod
    def learned_part(cls, config: EmbodiedConfig, spec: EnvSpec, action_size: int) -> slice:
        """See `OffPolicyAlgorithm`: the noise, or the actions that follow it."""
        if not _aliases(config):
            return slice(action_size)
        return slice(action_size, action_size + config.actor.model.num_action_chunks * spec.action_size)

    @classmethod
    def make_critics(cls, config: EmbodiedConfig, spec: EnvSpec, action_size: int) -> dict[str, Critics]:
        if not _aliases(config):
            return super().make_critics(config, spec, action_size)
        executed = config.actor.model.num_action_chunks * spec.action_size
        sizes = {CRITIC: executed, NOISE_CRITIC: action_size}
        return {name: cls.new_critics(config, spec, size) for name, size in sizes.items()}

    def prepare(self, observations: Observation) -> Inputs:
        """See `OffPolicyAlgorithm`: with noise aliasing, also the inputs of the frozen policy."""
        from recipes.embodied.models.base_policy import BasePolicy

        if self._noise_critics is not None:
            return self.policy.prepare(observations)
        return BasePolicy.prepare(self.policy, observations)

    def next_actions(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        noise, logprobs = super().next_actions(inputs)
        return noise if self._noise_critics is None else self.policy.carried_out(inputs, noise), logprobs

    def update_critics(self, batch: TransitionTensors, step: int, figures: Figures) -> None:
        """See `OffPolicyAlgorithm`; critics of noise learn from those of actions, at newly drawn noise."""
        import torch

        from recipes.embodied.models.critics import ensemble_loss
        from rlinf_core import Loss

        super().update_critics(batch, step, figures)
        critics = self._noise_critics
        if critics is None:
            return
        noise = self.policy.standard_noise(batch.rewards)
        with torch.no_grad():
            inputs = self.critics.encoded(batch.inputs)
            values = self.critics(inputs, self.policy.carried_out(inputs, noise))
        targets = reduced(values, self.settings.options.policy_values)

        def loss(part: TransitionTensors) -> Loss:
            # They share the encoder of the critics of actions, and do not train it.
            of_noise = ensemble_loss(critics(part.inputs, noise), targets)
            return Loss(of_noise.loss, {"critic/noise_loss": of_noise.loss.detach()})

        self.updaters[NOISE_CRITIC].update([replace(batch, inputs=inputs)], loss, step, figures)

    def values_of_choice(self, inputs: Inputs, actions: Tensor) -> Tensor:
        return (self._noise_critics or self.critics)(inputs, actions)

    @classmethod
    def check_policy(cls, config: EmbodiedConfig, report: Report) -> None:
        """See `OffPolicyAlgorithm`; also requires a policy with selectable noise, and steps whose noise is known."""
        model = config.actor.model
        if model.model_type != cls.policy_type:
            report(
                blame(config, ("actor", "model", "model_type"), LOSS),
                "conflicting-settings",
                f"`loss_type: dsrl` chooses the noise of a frozen policy, as `{cls.policy_type}` does, but"
                f" `model_type` is `{model.model_type}`",
                f"write `actor.model.model_type: {cls.policy_type}`, and the folder of the frozen policy as"
                " `model_path`",
            )
            return
        _check_sources(config, report)
        _check_frozen(config, report)


def _aliases(config: EmbodiedConfig) -> bool:
    settings = config.algorithm
    return isinstance(settings, DsrlSettings) and settings.options.noise_aliasing


def _check_sources(config: EmbodiedConfig, report: Report) -> None:
    for path, is_set, what in (
        (("data", "train_data_paths"), bool(config.data.train_data_paths), "demonstrations"),
        (("env", "train", "intervention", "source"), config.env.train.intervention.source != "none", "interventions"),
    ):
        if is_set:
            report(
                path,
                "conflicting-settings",
                f"`loss_type: dsrl` learns from noise, which is not known of {what}",
                "remove it; recipe `sft` trains the frozen policy by demonstrations before",
                about=[LOSS],
            )


def _check_frozen(config: EmbodiedConfig, report: Report) -> None:
    from recipes.embodied.models.folder_facts import frozen_section, observed_steps

    model = config.actor.model
    try:
        frozen = frozen_section(model)
    except ConfigError as error:
        report(_FOLDER, "missing-key" if model.model_path is None else "bad-value", error.message, error.help or "")
        return
    # A folder without settings is on another machine, or `folder_facts` reports it.
    said = "model_type" in frozen.model_fields_set
    if said and frozen.model_type not in _STEERABLE and ":" not in frozen.model_type:
        report(
            _FOLDER,
            "conflicting-settings",
            f"`loss_type: dsrl` needs a policy that begins with noise, and the `{frozen.model_type}` in"
            f" `{frozen.model_path}` does not",
            f"name one of {', '.join(f'`{name}`' for name in _STEERABLE)}; if the folder is of another library, write"
            " its `options: {policy: {model_type: ...}}`",
            about=[LOSS, ("actor", "model", "options", "policy")],
        )
    if frozen.model_type == "lerobot":
        _check_sampler(frozen, report)
    if _aliases(config) and (frozen.model_type in _READERS or observed_steps(frozen) > 1):
        report(
            ("algorithm", "options", "noise_aliasing"),
            "conflicting-settings",
            "`noise_aliasing` runs the frozen policy on observations of the replay buffer, which has no instructions"
            " and none of earlier steps",
            "remove it",
            about=[_FOLDER],
        )


def _check_sampler(frozen: EmbodiedModelConfig, report: Report) -> None:
    """Report a policy of lerobot whose actions are no function of the initial noise."""
    from recipes.embodied.config.model_config import DETERMINISTIC_SCHEDULER, NOISE_LEROBOT
    from recipes.embodied.models.folder_facts import SETTINGS, lerobot_type, read_object

    kind, key = lerobot_type(frozen), "noise_scheduler_type"
    written: dict[str, Any] = frozen.options.get("config") or {}
    settings = {**read_object(FilePath(str(frozen.model_path)) / SETTINGS), **written}
    if kind is None or (kind in NOISE_LEROBOT and settings.get(key) == DETERMINISTIC_SCHEDULER):
        return
    if kind in NOISE_LEROBOT:
        message = f"its sampler, `{settings.get(key)}`, draws more noise at each step"
        remedy = f"write `options: {{policy: {{options: {{config: {{{key}: {DETERMINISTIC_SCHEDULER}}}}}}}}}`"
    else:
        message, remedy = "its actions do not come from noise alone", "use lerobot's `diffusion`, or `flow_policy`"
    report(_FOLDER, "conflicting-settings", f"lerobot's `{kind}` cannot be steered: {message}", remedy, about=[LOSS])
