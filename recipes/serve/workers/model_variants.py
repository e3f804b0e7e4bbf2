"""The served model, adapters of it, and copies of it whose weights are all trained; one is computed with at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from recipes.language.models.policy import LanguagePolicy
from recipes.serve.saved_files import ADAPTER, read_adapter
from recipes.serve.values import AdapterSettings
from recipes.serve.workers.adapters import AdapterModel, read_weights
from recipes.training.tensor_files import write_tensors
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# As transformers names them, so that it loads what is saved here.
_WEIGHTS: Final = "model.safetensors"


class ModelVariants:
    """A model with adapters, and copies of the model whose weights are all their own.

    Args:
        model: the model whose weights stay as they are.
        alpha: scale of all adapters, divided by their ranks.
        copy: loads or builds the model once more, for weights that are all trained.
        autocast: the type that copies compute in, where it is not that of their weights.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        alpha: float,
        copy: Callable[[], PreTrainedModel],
        autocast: torch.dtype | None = None,
    ) -> None:
        self.adapters = AdapterModel(model, alpha)
        self._copy = copy
        self._autocast = autocast
        self._copies: dict[str, LanguagePolicy] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._copies or name in self.adapters

    def add(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter, or a copy of the model, with first values.

        Raises:
            ConfigError: an adapter has no layers, or the model cannot be loaded.
        """
        if settings.rank:
            self.adapters.add(name, settings)
            return
        model = self._copy()
        model.requires_grad_(True)
        self._copies[name] = LanguagePolicy(model)

    def load(self, name: str, folder: Path) -> AdapterSettings:
        """Add what is in a folder of `save`, and return its settings.

        Raises:
            ConfigError: the folder has another model's, or values that are not finite.
            OSError: a file is missing or damaged.
        """
        settings = read_adapter(folder)
        if settings.rank:
            return self.adapters.load(name, folder)
        values = read_weights(folder / _WEIGHTS)
        self.add(name, settings)
        own = _tensors(self._copies[name].causal)
        if {key: value.shape for key, value in own.items()} != {key: value.shape for key, value in values.items()}:
            self.remove(name)
            raise ConfigError(f"the weights in `{folder.name}` are those of another model")
        with torch.no_grad():
            for key, value in own.items():
                value.copy_(values[key])
        return settings

    def save(self, name: str, settings: AdapterSettings, folder: Path) -> None:
        """Write an adapter, or all weights, into a folder that exists: what peft or transformers reads, and settings.

        Raises:
            OSError: it cannot be written.
        """
        if settings.rank:
            self.adapters.save(name, settings, folder)
            return
        model: Any = self._copies[name].causal
        write_tensors(folder / _WEIGHTS, _tensors(model))
        model.config.save_pretrained(folder)
        (folder / ADAPTER).write_text(json.dumps(settings._asdict()))

    def rename(self, name: str, new: str) -> None:
        """Give an adapter or a copy another name."""
        if name in self._copies:
            self._copies[new] = self._copies.pop(name)
        else:
            self.adapters.rename(name, new)

    def remove(self, name: str) -> None:
        """Remove an adapter or a copy, and free its memory."""
        if self._copies.pop(name, None) is None:
            self.adapters.remove(name)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return the weights that are trained, by the names that they are saved with."""
        if name in self._copies:
            return dict(self._copies[name].causal.named_parameters())
        return self.adapters.parameters(name)

    @contextmanager
    def using(self, name: str | None) -> Generator[LanguagePolicy, None, None]:
        """Compute with an adapter or a copy in here; None: with the model as it is."""
        policy = self._copies.get(name) if name is not None else None
        if policy is None:
            with self.adapters.using(name):
                yield self.adapters.policy
        elif self._autocast is None:
            yield policy
        else:
            with torch.autocast(policy.causal.device.type, self._autocast):
                yield policy


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model and what else its state has, each once."""
    state, buffers = model.state_dict(), dict(model.named_buffers())
    return {**dict(model.named_parameters()), **{name: state[name] for name in state if name in buffers}}
