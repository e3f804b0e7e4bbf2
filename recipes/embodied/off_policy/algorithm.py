"""The common part of algorithms that learn from a replay buffer, and the lookup of a job's algorithm.

These classes also check job files, so that torch is imported only where they compute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from recipes.embodied.config.algorithm_config import (
    BootstrappedSettings,
    LearningConfig,
    OffPolicyMethod,
    OffPolicySettings,
    method_of,
    off_policy_of,
)
from recipes.sections.checks import Report, blame
from rlinf_core import ConfigError
from rlinf_core.config.tree import Path

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from recipes.embodied.config import EmbodiedConfig
    from recipes.embodied.envs.env_spec import EnvSpec, Observation
    from recipes.embodied.models.base_policy import Inputs
    from recipes.embodied.models.critics import Critics
    from recipes.embodied.models.normalization import Normalization
    from recipes.embodied.off_policy.storage import ReplayBatch
    from recipes.training.arrays import Array
    from recipes.training.updater import Figures, Updater
    from recipes.training.weights.training_state import TrainingState
    from rlinf_core import Loss


Settings = TypeVar("Settings", bound=OffPolicySettings)
Bootstrapped = TypeVar("Bootstrapped", bound=BootstrappedSettings)
Kind = TypeVar("Kind")
# The weights of critics in a checkpoint.
CRITIC: Final = "critic"
_CRITIC_LAYERS: Final = 2
LOSS: Final[Path] = ("algorithm", "loss_type")


@dataclass(frozen=True)
class TransitionTensors:
    """A `ReplayBatch` as tensors on the device, its observations prepared by the policy."""

    inputs: Inputs
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    next_inputs: Inputs

    @classmethod
    def of(
        cls, batch: ReplayBatch, prepare: Callable[[Observation], Inputs], device: torch.device
    ) -> TransitionTensors:
        """Return a batch on a device, with observations converted by `prepare`."""
        import torch

        def moved(array: Array) -> Tensor:
            return torch.from_numpy(array).to(device)  # pyright: ignore[reportUnknownMemberType]

        return cls(
            prepare(batch.observations),
            moved(batch.actions),
            moved(batch.rewards),
            moved(batch.discounts),
            prepare(batch.next_observations),
        )


class OffPolicyAlgorithm(OffPolicyMethod, ABC, Generic[Settings]):
    """An algorithm that learns from a replay buffer: its keys, its requirements on a job, and its updates.

    Class methods check a job's file. An instance takes updates of critics and policy, together with other ranks. Random
    numbers come from torch's own generator, which the caller seeds.

    Args:
        settings: the section `algorithm`.
        policy: a `SquashedPolicy` with its optimizer.
        critics: the critics of `make_critics`, by name, with their optimizers.
        lr: the learning rate of any further parameters of an algorithm.
        clip_grad: largest norm of the gradient; 0: no limit.
        skip_nonfinite: skip updates with a NaN or an infinity instead of raising.

    Raises:
        ConfigError: the policy's image encoder is frozen, which the critics train.

    Attributes:
        updates: the number of updates of the critics since the beginning.
    """

    def __init__(
        self,
        settings: Settings,
        policy: TrainingState,
        critics: Mapping[str, TrainingState],
        *,
        lr: float,
        clip_grad: float = 0.0,
        skip_nonfinite: bool = False,
    ) -> None:
        from recipes.embodied.models.critics import Critics, copy_weights, frozen_copy
        from recipes.embodied.models.squashed_policy import SquashedPolicy
        from recipes.training.updater import Updater

        self.settings, self.lr, self.strategy = settings, lr, policy.strategy
        self.policy = trained(policy, SquashedPolicy)
        self.critics = trained(critics[CRITIC], Critics)
        # Only the critics' loss trains the image encoder, as in SAC-AE (arXiv 1910.01741). Target critics use its
        # features, too, as in DrQ-v2 (arXiv 2107.09645). The policy acts with a copy.
        self._encoder = tuple(list(module.features.parameters()) for module in (self.policy, self.critics))
        if not all(weight.requires_grad for weight in self._encoder[0]):
            raise ConfigError(
                f"`loss_type: {settings.loss_type}` trains the image encoder `features` of the policy with the critics",
                where="actor.model.trainable",
                why="no pattern matches its weights, which would be trained nevertheless",
                help="add `features.*`",
            )
        # A loaded policy has a trained encoder.
        copy_weights(*reversed(self._encoder))
        self.target_critics = frozen_copy(self.critics) if self.uses_target_critics else None
        self.target_policy = frozen_copy(self.policy) if self.uses_target_policy else None
        # Cached for all updates, since a module collects its weights anew on each call.
        self._judging = [weight for state in critics.values() for weight in state.policy.parameters()]
        self._followers: list[tuple[list[Tensor], list[Tensor]]] = [
            (list(target.parameters()), list(module.parameters()))
            for target, module in ((self.target_critics, self.critics), (self.target_policy, self.policy))
            if target is not None
        ]
        self.updaters: dict[str, Updater] = {
            name: Updater(state.strategy, state.optimizer, clip_grad=clip_grad, skip_nonfinite=skip_nonfinite)
            for name, state in {"policy": policy, **critics}.items()
        }
        self.updates = 0

    # The losses of an algorithm

    @abstractmethod
    def critic_loss(self, batch: TransitionTensors) -> Loss:
        """Return the loss of the critics."""

    @abstractmethod
    def policy_loss(self, batch: TransitionTensors) -> Loss:
        """Return the loss of the policy, without gradients for critics' weights. Inputs contain features of images."""

    # Checks of a job's file, and the critics for it

    @classmethod
    def check(cls, config: EmbodiedConfig, report: Report) -> None:
        """Report settings of a job that prevent learning."""
        cls.check_policy(config, report)

    @classmethod
    def check_policy(cls, config: EmbodiedConfig, report: Report) -> None:
        """Report a policy that it cannot train."""
        model, loss = config.actor.model, config.algorithm.loss_type
        if model.model_type != cls.policy_type:
            report(
                blame(config, ("actor", "model", "model_type"), LOSS),
                "conflicting-settings",
                f"`loss_type: {loss}` trains a `{cls.policy_type}`, but `model_type` is `{model.model_type}`",
                f"write `actor.model.model_type: {cls.policy_type}`",
            )
            return
        if model.num_action_chunks != 1:
            report(
                ("actor", "model", "num_action_chunks"),
                "conflicting-settings",
                f"`loss_type: {loss}` learns the value of single actions",
                "write `num_action_chunks: 1`",
                about=[LOSS],
            )
        noise = model.options.get("exploration_noise")
        at: Path = ("actor", "model", "options", "exploration_noise")
        if cls.has_fixed_noise and noise is None:
            report(
                blame(config, at, LOSS),
                "conflicting-settings",
                f"`loss_type: {loss}` explores with noise of a fixed size, but none is set",
                "write `actor.model.options: {exploration_noise: 0.1}`",
            )
        if cls.has_fixed_noise is False and noise is not None:
            message = f"`loss_type: {loss}` learns how much to explore; `exploration_noise` would fix it"
            report(at, "conflicting-settings", message, "remove it, or write `loss_type: td3`", about=[LOSS])

    @classmethod
    def learned_part(cls, config: EmbodiedConfig, spec: EnvSpec, action_size: int) -> slice:
        """Return the part of a drawn action that the critics learn from; the policy chooses `action_size` numbers."""
        return slice(action_size)

    @classmethod
    def make_critics(cls, config: EmbodiedConfig, spec: EnvSpec, action_size: int) -> dict[str, Critics]:
        """Return new critics of a policy's draws, by the names of their weights in a checkpoint."""
        return {CRITIC: cls.new_critics(config, spec, action_size)}

    @classmethod
    def new_critics(cls, config: EmbodiedConfig, spec: EnvSpec, action_size: int) -> Critics:
        """Return critics of actions [n, action_size]."""
        from recipes.embodied.envs.env_spec import learned_spec
        from recipes.embodied.models.critics import Critics
        from recipes.embodied.models.squashed_policy import image_features

        settings, model = off_policy_of(config.algorithm), config.actor.model
        return Critics(
            learned_spec(spec, action_size),
            settings.critics,
            model.hidden_dim,
            _CRITIC_LAYERS,
            settings.critic_norm,
            judges_states=cls.judges_states,
            images=image_features(model),
        )

    # Updates

    def normalize(self, normalization: Normalization) -> None:
        """Set the normalization of states for policy and critics, including targets."""
        self.policy.normalization = normalization
        for critics in (self.critics, self.target_critics):
            if critics is not None:
                critics.normalization = self.policy.scaling
        if self.target_policy is not None:
            self.target_policy.normalization = normalization

    def prepare(self, observations: Observation) -> Inputs:
        """Convert observations of a replay buffer to inputs of the policy and the critics."""
        return self.policy.prepare(observations)

    def update(self, batch: TransitionTensors, step: int, figures: Figures, critic_figures: Figures) -> None:
        """Update the critics, in every `policy_interval`-th update the policy, and then the targets.

        Args:
            batch: the batch of this rank.
            step: the training step, for messages.
            figures: receives the metrics of the policy.
            critic_figures: receives the metrics of the critics.

        Raises:
            NonFiniteError: a loss or a gradient is not finite.
        """
        from recipes.embodied.models.critics import copy_weights, move_toward

        self.update_critics(batch, step, critic_figures)
        copy_weights(*self._encoder)
        self.updates += 1
        updates_policy = self.updates % self.settings.policy_interval == 0
        if updates_policy:
            self.update_policy(batch, step, figures)
        if updates_policy or not self.uses_target_policy:
            # If the policy has a target, too, all targets wait for its update.
            for targets, weights in self._followers:
                move_toward(targets, weights, self.settings.target_rate)

    def update_critics(self, batch: TransitionTensors, step: int, figures: Figures) -> None:
        """Take one update of the critics."""
        self.updaters[CRITIC].update([batch], self.critic_loss, step, figures)

    def update_policy(self, batch: TransitionTensors, step: int, figures: Figures) -> None:
        """Take one update of the policy."""
        import torch

        from recipes.embodied.models.critics import without_gradients

        with torch.no_grad():
            batch = replace(batch, inputs=self.critics.encoded(batch.inputs))
        with without_gradients(self._judging):
            self.updaters["policy"].update([batch], self.policy_loss, step, figures)

    # State

    def metrics(self) -> dict[str, float]:
        """Return metrics of the current state by their full names."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Return the checkpointed state besides weights and optimizers: target networks and the update count."""
        import torch

        return {
            **{
                f"{name}.{key}": weight
                for name, target in self._targets().items()
                for key, weight in target.state_dict().items()
            },
            **{f"critic_buffers.{name}": buffer for name, buffer in self.critics.named_buffers()},
            "updates": torch.tensor(self.updates),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state that `state` returned."""
        from recipes.training.tensor_files import below

        for name, target in self._targets().items():
            target.load_state_dict(below(state, name))
        for name, buffer in self.critics.named_buffers():
            buffer.copy_(state[f"critic_buffers.{name}"])
        self.updates = int(state["updates"])

    def _targets(self) -> dict[str, nn.Module]:
        targets = {"target_critics": self.target_critics, "target_policy": self.target_policy}
        return {name: target for name, target in targets.items() if target is not None}

    def check_weights(self, where: str) -> None:
        """Refuse weights that are not finite; see `Updater.check_weights`."""
        for updater in self.updaters.values():
            updater.check_weights(where)


class BootstrappedAlgorithm(OffPolicyAlgorithm[Bootstrapped]):
    """An algorithm whose critics learn from rewards and the least value of the next action."""

    @classmethod
    def check(cls, config: EmbodiedConfig, report: Report) -> None:
        """See `OffPolicyAlgorithm`; also report a target with more critics than exist."""
        super().check(config, report)
        settings, at = config.algorithm, ("algorithm",)
        if isinstance(settings, BootstrappedSettings) and settings.options.critics_in_target > settings.critics:
            report(
                blame(config, (*at, "options", "critics_in_target"), (*at, "critics")),
                "conflicting-settings",
                f"`critics_in_target: {settings.options.critics_in_target}` exceeds `critics: {settings.critics}`",
                f"write at most {settings.critics}",
            )

    @abstractmethod
    def next_actions(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Return the next actions [n, A], and their log-probabilities [n] if entropy counts."""

    def critic_loss(self, batch: TransitionTensors) -> Loss:
        """See `OffPolicyAlgorithm`: the squared errors against the target critics."""
        import torch

        with torch.no_grad():
            following = self.critics.encoded(batch.next_inputs)
            actions, logprobs = self.next_actions(following)
            critics = self.critics if self.target_critics is None else self.target_critics
            values = critics(following, actions)
        return self.regression(batch, self.critics(batch.inputs, batch.actions), values, logprobs)

    def regression(self, batch: TransitionTensors, values: Tensor, following: Tensor, logprobs: Tensor | None) -> Loss:
        """Return the loss of values [E, n], given the values and log-probabilities of the next actions."""
        import torch

        from recipes.embodied.models.critics import bootstrapped_targets, ensemble_loss

        drawn = self.settings.options.critics_in_target
        if drawn < len(following):
            following = following[torch.randperm(len(following), device=following.device)[:drawn]]
        targets = bootstrapped_targets(batch.rewards, batch.discounts, following, logprobs, self.entropy_weight())
        return ensemble_loss(values, targets)

    def entropy_weight(self) -> Tensor | float:
        """Return the weight of the entropy of later actions."""
        return 0.0


def trained(state: TrainingState, kind: type[Kind]) -> Kind:
    """Return the module that a state trains.

    Raises:
        TypeError: the module is of another kind.
    """
    if not isinstance(state.policy, kind):
        raise TypeError(f"off-policy learning needs a {kind.__name__}, not a {type(state.policy).__name__}")
    return state.policy


def algorithm_of(section: LearningConfig) -> type[OffPolicyAlgorithm[Any]]:
    """Return the algorithm that the section `algorithm` names.

    Raises:
        TypeError: the job learns on-policy.
    """
    return cast("type[OffPolicyAlgorithm[Any]]", method_of(section))
