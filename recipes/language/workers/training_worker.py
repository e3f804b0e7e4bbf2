"""Workers that hold a language model and train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from recipes.language.learning.warm_start import begin_training
from recipes.language.models.policy import LanguagePolicy
from recipes.training.updater import SKIPPED, Figures
from recipes.training.weights.training_state import TrainingState
from recipes.training.worker_parts import ComparingWorker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TrainingWorker(ComparingWorker):
    """A worker that trains a model, shared by the ranks of its group as `actor.fsdp_config` says."""

    _state: TrainingState

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._config = config

    def _begin_training(
        self, tokenizer: PreTrainedTokenizerBase, is_sent: Callable[[str], bool] = lambda _: False
    ) -> LanguagePolicy:
        """Load or build the model of `actor`; see `begin_training`."""
        policy, self._state = begin_training(
            self._config,
            tokenizer,
            self._contact,
            device=self.torch_device,
            rank=self._rank,
            world_size=self._world_size,
            is_sent=is_sent,
        )
        return policy

    def _offload(self) -> None:
        """Free the accelerator for other components, if `actor.enable_offload` is set."""
        if self._config.actor.enable_offload:
            self._state.offload()

    def _begin_step(self, step: int, last_step: int | None) -> float:
        """Move the training state onto the accelerator, and return the learning rate of a step."""
        self._state.onload()
        return self._state.apply_settings(step, last_step)

    def _end_step(self, step: int, figures: Figures) -> dict[str, float]:
        """Count the step, and return metrics of its updates."""
        self._state.version += 1
        self._offload()
        if figures.skipped:
            self.log_warning(SKIPPED, step, figures.skipped)
        return figures.metrics(counts_skipped=self._config.runner.on_nonfinite == "skip")

    def save_checkpoint(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees. Collective: all ranks call it."""
        self._state.save(folder)

    def load_checkpoint(self, folder: str) -> int:
        """Load a checkpoint of `save_checkpoint`, and return the version of the weights."""
        self._state.load(folder)
        return self._state.version
