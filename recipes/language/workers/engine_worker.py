"""Workers that hold an engine: loading its weights, and offloading it."""

from __future__ import annotations

import torch

from recipes.language.config.group_names import LanguageLayout
from recipes.language.config.language_config import LanguageConfig
from recipes.language.engines.engine import Engine
from recipes.language.engines.registry import make_engine
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.weights.weight_transfer import IncomingWeights, WeightUpdate
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.weights.weight_sync import receiver_ranks


class EngineWorker(ComparingWorker):
    """Generates with an engine whose weights come from the actors."""

    config_section = "rollout"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config
        self._sleeps = False

    def init_worker(self, layout: LanguageLayout) -> None:
        """Start the engine; its weights arrive with the first `sync_model_from_actor`."""
        config = self._config
        torch.set_num_threads(config.rollout.threads)
        self._layout = layout
        self._tokenizer = make_tokenizer(config.actor)
        self._stops = stop_token_ids(self._tokenizer, config.actor.model.model_path)
        self._engine = self.make_engine(self._stops)

    def make_engine(self, stops: tuple[int, ...]) -> Engine:
        """Return the engine that answers; a subclass may wrap it.

        Args:
            stops: tokens that end every answer.
        """
        owner = str(self.worker_info.address)
        return make_engine(self._config, self._tokenizer, stops, self.torch_device, self._contact, owner)

    def sync_model_from_actor(self) -> int:
        """Load the weights that the actor sends, and return their version.

        Raises:
            RLinfError: the loaded weights differ from those that were sent.
        """
        self._wake()
        update = self._receive().wait()
        self._load(update)
        return update.version

    def _load(self, update: WeightUpdate) -> None:
        update.apply(self._engine)

    def _receive(self) -> IncomingWeights:
        """Start receiving weights from the actor."""
        layout, source = self._layout, self._rank % self._layout.actors
        ranks = receiver_ranks(source, layout.actors, layout.rollouts)
        groups = [(self._config.rollout.group_name, ranks)]
        actor = (self._config.actor.group_name, source)
        return IncomingWeights(lambda: self.broadcast(None, groups, actor, async_op=True), may_keep=len(ranks) == 1)

    def offload(self, weights_follow: bool) -> None:
        """Release accelerator memory until the next call: all of it if new weights arrive before the next answers.

        With a LoRA adapter nothing but the adapter comes, and the weights stay.
        """
        whole = weights_follow and self._config.actor.model.adapter() is None
        self._engine.sleep(2 if whole else 1)
        self._sleeps = True

    def _wake(self) -> None:
        if self._sleeps:
            self._engine.wake()
            self._sleeps = False

    def _close(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()
