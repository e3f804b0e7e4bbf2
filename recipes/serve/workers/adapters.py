"""The served model: several LoRA adapters of it, each with its own rank, and copies whose weights are all trained.

One of them is computed with at a time.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from recipes.language.models.load_model import make_model
from recipes.language.models.policy import LanguagePolicy
from recipes.serve.config import ServeConfig
from recipes.serve.saved_files import ADAPTER, read_adapter
from recipes.serve.values import AdapterSettings, ServedFacts
from recipes.training.tensor_files import read_tensors, write_tensors
from recipes.training.typed_tensors import DTYPES
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# As peft names them, so that it loads what is saved here.
WEIGHTS: Final = "adapter_model.safetensors"
PEFT_SETTINGS: Final = "adapter_config.json"
OPTIMIZER: Final = "optimizer.safetensors"
_ATTENTION: Final = ("attn", "attention")


class ModelVariants:
    """A model with adapters, W + (alpha / rank) B A (Hu et al., "LoRA", arXiv 2106.09685), and copies of the model
    whose weights are all their own.

    Args:
        model: the model whose weights stay as they are.
        alpha: scale of all adapters, divided by their ranks.
        copy: loads or builds the model once more, for weights that are all trained.
        autocast: the type that copies compute in, where it is not that of their weights.

    Attributes:
        policy: computes with the model and the adapter in use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        alpha: float,
        copy: Callable[[], PreTrainedModel],
        autocast: torch.dtype | None = None,
    ) -> None:
        model.requires_grad_(False)
        self.model = model
        self.policy = LanguagePolicy(model)
        self._alpha = alpha
        self._copy = copy
        self._autocast = autocast
        self._linear = _linear_names(model)
        self._copies: dict[str, LanguagePolicy] = {}
        # peft's names of adapters, which may not contain a dot, by ours.
        self._labels: dict[str, str] = {}
        self._created = 0
        # The layers that have adapters, by path: a walk over all modules takes as long as a step where there are many.
        self._tuned: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._copies or name in self._labels

    def add(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter, of which B is 0, so that it changes nothing yet, or a copy of the model.

        Raises:
            ConfigError: an adapter has no layers, or the model cannot be loaded.
        """
        self._make(name, settings)
        if settings.rank:
            self._draw_first_values(name, settings.seed)

    def _make(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter whose values are still to be set, or a copy of the model."""
        if settings.rank:
            self._inject(name, settings)
        else:
            model = self._copy()
            model.requires_grad_(True)
            self._copies[name] = LanguagePolicy(model)

    def _inject(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter whose values are still to be set."""
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        layers = self._layers(settings)
        if not layers:
            raise ConfigError("the adapter trains none of attention, MLP and output layer", help="train one of them")
        self._created += 1
        label = f"a{self._created}"
        config = LoraConfig(r=settings.rank, lora_alpha=cast("Any", self._alpha), target_modules=layers)
        with warnings.catch_warnings():
            # Of tied output layers, which stay unmerged here.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, self.model, label)
        self._labels[name] = label
        self._tuned = {path: module for path, module in _modules(self.model) if isinstance(module, LoraLayer)}
        self._trainable()

    def _draw_first_values(self, name: str, seed: int) -> None:
        """Draw A as peft does, of the seed alone: other threads may draw from the generator of the process."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, weight in self.parameters(name).items():
                if ".lora_A." in key:
                    first = torch.empty(weight.shape)
                    weight.copy_(nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator))

    def rename(self, name: str, new: str) -> None:
        """Give an adapter or a copy another name."""
        named: dict[str, Any] = self._copies if name in self._copies else self._labels
        named[new] = named.pop(name)

    def remove(self, name: str) -> None:
        """Remove an adapter or a copy, and free its memory."""
        if self._copies.pop(name, None) is not None:
            return
        label = self._labels.pop(name)
        cast("Any", self.model).peft_config.pop(label, None)
        for layer in self._tuned.values():
            for part in (layer.lora_A, layer.lora_B, layer.lora_dropout):
                if label in part:
                    del part[label]
            for values in (layer.r, layer.lora_alpha, layer.scaling):
                values.pop(label, None)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return the weights that are trained, by the names that they are saved with."""
        if name in self._copies:
            return dict(self._copies[name].causal.named_parameters())
        label, result = self._labels[name], dict[str, nn.Parameter]()
        for path, layer in self._tuned.items():
            for part in ("lora_A", "lora_B"):
                matrices = getattr(layer, part)
                if label in matrices:
                    result[f"base_model.model.{path}.{part}.weight"] = matrices[label].weight
        return result

    def _saved(self, name: str) -> Mapping[str, Tensor]:
        """Return what is saved of an adapter or a copy: its weights, and what else the state of a copy has."""
        return _tensors(self._copies[name].causal) if name in self._copies else self.parameters(name)

    @contextmanager
    def using(self, name: str | None) -> Generator[LanguagePolicy, None, None]:
        """Compute with an adapter or a copy in here; None: with the model as it is."""
        policy = self._copies.get(name) if name is not None else None
        if policy is None:
            label = None if name is None else self._labels[name]
            for layer in self._tuned.values():
                layer._active_adapter = [] if label is None else [label]
                layer._disable_adapters = label is None
            yield self.policy
        elif self._autocast is None:
            yield policy
        else:
            with torch.autocast(policy.causal.device.type, self._autocast):
                yield policy

    def save(self, name: str, settings: AdapterSettings, folder: Path) -> None:
        """Write an adapter, or all weights, into a folder that exists: what peft or transformers reads, and settings.

        Raises:
            OSError: it cannot be written.
        """
        write_tensors(folder / _file_of(settings), self._saved(name))
        if settings.rank:
            peft = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": self._alpha, "bias": "none"}
            layers = {"target_modules": self._layers(settings), "task_type": "CAUSAL_LM"}
            (folder / PEFT_SETTINGS).write_text(json.dumps({**peft, **layers}, indent=1))
        else:
            cast("Any", self._copies[name].causal).config.save_pretrained(folder)
        (folder / ADAPTER).write_text(json.dumps(settings._asdict()))

    def load(self, name: str, folder: Path) -> AdapterSettings:
        """Add what is in a folder of `save`, and return its settings.

        Raises:
            ConfigError: the folder has another model's, or values that are not finite.
            OSError, ValueError: a file is missing or damaged.
        """
        settings = read_adapter(folder)
        values = read_weights(folder / _file_of(settings))
        self._make(name, settings)
        own = self._saved(name)
        if {key: weight.shape for key, weight in own.items()} != {key: value.shape for key, value in values.items()}:
            self.remove(name)
            raise ConfigError(f"the weights in `{folder.name}` are those of another model")
        with torch.no_grad():
            for key, weight in own.items():
                weight.copy_(values[key])
        return settings

    def _layers(self, settings: AdapterSettings) -> list[str]:
        wanted = {"attn": settings.train_attn, "mlp": settings.train_mlp, "unembed": settings.train_unembed}
        return [name for name, kind in self._linear.items() if wanted[kind]]

    def _trainable(self) -> None:
        """Enable gradients for all adapters: peft disables those of inactive ones."""
        for name in self._labels:
            for weight in self.parameters(name).values():
                weight.requires_grad_()


def _linear_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the linear layers by name, each with its kind: attn, mlp or unembed."""
    head = cast("Any", model).get_output_embeddings()
    kinds: dict[str, str] = {}
    for name, module in _modules(model):
        if isinstance(module, nn.Linear):
            attends = any(word in part for part in name.split(".") for word in _ATTENTION)
            kinds[name] = "unembed" if module is head else "attn" if attends else "mlp"
    return kinds


def _modules(model: Any) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules())


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the host.

    Raises:
        ConfigError: a value is NaN or infinite.
        OSError, ValueError: see `read_tensors`.
    """
    tensors = read_tensors(file)
    if not are_finite(tensors.values()):
        raise ConfigError(f"the weights in `{file.parent.name}` have values that are NaN or infinite")
    return tensors


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no value is NaN or infinite."""
    return bool(torch.stack([tensor.isfinite().all() for tensor in tensors]).all())


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, a scalar."""
    return nn.utils.get_total_norm([weight.grad for weight in parameters if weight.grad is not None])


def served_dtype(config: ServeConfig, device: torch.device) -> torch.dtype:
    """Return the type of the weights: the configured one; on a CPU float32, where half the bits are slower."""
    return DTYPES[config.actor.model.precision] if device.type != "cpu" else torch.float32


def load_base(config: ServeConfig, tokenizer: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return the model that is served, in evaluation mode, on its device.

    Args:
        config: the whole file.
        tokenizer: the tokenizer of the model.
        device: where it computes.
        dtype: the type of its weights; None: see `served_dtype`.

    Raises:
        ConfigError: it cannot be loaded, or does not know all tokens of the tokenizer.
    """
    model: Any = make_model(config.actor, tokenizer, dtype or served_dtype(config, device))
    return model.to(device).eval()


def served_facts(model: Any, stops: tuple[int, ...]) -> ServedFacts:
    """Return what the server has to know of the model."""
    return ServedFacts(model.get_input_embeddings().weight.shape[0], stops)


def _file_of(settings: AdapterSettings) -> str:
    """Return the file of weights: peft and transformers load what is saved here."""
    return WEIGHTS if settings.rank else "model.safetensors"


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model and what else its state has, each once."""
    state, buffers = model.state_dict(), dict(model.named_buffers())
    return {**dict(model.named_parameters()), **{name: state[name] for name in state if name in buffers}}
