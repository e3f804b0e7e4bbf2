"""The served model with several LoRA adapters of different ranks, and copies whose weights are all trained.

Only one adapter or copy is in use at a time.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from recipes.language.models.load_model import make_model
from recipes.language.models.packing import RowLayout
from recipes.language.models.policy import LanguagePolicy
from recipes.sections.model_folders import ADAPTED
from recipes.serve.config import ServeConfig
from recipes.serve.values import ADAPTER, AdapterSettings, Datum, ServedFacts, read_adapter
from recipes.training.tensor_files import read_tensors, write_tensors
from recipes.training.typed_tensors import DTYPES
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Names of peft, so that it can load the files.
WEIGHTS: Final = "adapter_model.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
_ATTENTION: Final = ("attn", "attention")


class ModelVariants:
    """A model with adapters, W + (alpha / rank) B A (Hu et al., "LoRA", arXiv 2106.09685), and fully trained copies of
    the model.

    Args:
        model: the model, whose weights are frozen.
        alpha: the scale of all adapters, to be divided by their ranks.
        copy: loads or builds another copy of the model.
        autocast: the compute type of copies; None: the type of their weights.

    Attributes:
        policy: the model as a policy, with the adapter in use.
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
        # peft's adapter names, which must not contain a dot, by our names.
        self._labels: dict[str, str] = {}
        self._created = 0
        # The layers with adapters, by path, since a walk over many modules takes as long as a step.
        self._tuned: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._copies or name in self._labels

    def add(self, name: str, settings: AdapterSettings) -> None:
        """Add a copy of the model, or an adapter that changes nothing yet, as its B is 0.

        Raises:
            ConfigError: the adapter has no layers, or the model cannot be loaded.
        """
        self._make(name, settings)
        if settings.rank:
            self._draw_first_values(name, settings.seed)

    def _make(self, name: str, settings: AdapterSettings) -> None:
        """Add an uninitialized adapter, or a copy of the model."""
        if settings.rank:
            self._inject(name, settings)
        else:
            model = self._copy()
            model.requires_grad_(True)
            self._copies[name] = LanguagePolicy(model)

    def _inject(self, name: str, settings: AdapterSettings) -> None:
        """Add an uninitialized adapter."""
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        layers = self._layers(settings)
        # Without layers of another kind, as in GPT-2, which has `Conv1D`, the output layer alone would be trained.
        if not layers or ((settings.train_attn or settings.train_mlp) and set(self._linear.values()) <= {"unembed"}):
            raise ConfigError(
                f"`{type(self.model).__name__}` has no `Linear` layers of the kinds that the adapter should train",
                help="serve another model, or all weights of this one by `server.full_weights`",
            )
        self._created += 1
        label = f"a{self._created}"
        config = LoraConfig(r=settings.rank, lora_alpha=cast("Any", self._alpha), target_modules=layers)
        with warnings.catch_warnings():
            # Ignore the warning about tied output layers, which are never merged here.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, self.model, label)
        self._labels[name] = label
        self._tuned = {path: module for path, module in _modules(self.model) if isinstance(module, LoraLayer)}
        self._trainable()

    def _draw_first_values(self, name: str, seed: int) -> None:
        """Initialize A like peft, but from the seed alone, as other threads may use the global generator."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, weight in self.parameters(name).items():
                if ".lora_A." in key:
                    first = torch.empty(weight.shape)
                    weight.copy_(nn.init.kaiming_uniform_(first, a=math.sqrt(5), generator=generator))

    def rename(self, name: str, new: str) -> None:
        """Rename an adapter or a copy."""
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
        """Return the trained weights, by their names in saved files."""
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
        """Return the tensors to save of an adapter or a copy: weights, and buffers in a copy's state."""
        return _tensors(self._copies[name].causal) if name in self._copies else self.parameters(name)

    @contextmanager
    def using(self, name: str | None) -> Generator[LanguagePolicy, None, None]:
        """Use an adapter or a copy within the block; None: the base model."""
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
        """Write an adapter for peft, or all weights for transformers, with settings, into an existing folder.

        Raises:
            OSError: the folder cannot be written.
        """
        write_tensors(folder / _file_of(settings), self._saved(name))
        if settings.rank:
            peft = {"peft_type": "LORA", "r": settings.rank, "lora_alpha": self._alpha, "bias": "none"}
            layers = {"target_modules": self._layers(settings), "task_type": "CAUSAL_LM"}
            (folder / ADAPTED).write_text(json.dumps({**peft, **layers}, indent=1))
        else:
            cast("Any", self._copies[name].causal).config.save_pretrained(folder)
        (folder / ADAPTER).write_text(json.dumps(settings._asdict()))

    def load(self, name: str, folder: Path) -> AdapterSettings:
        """Add an adapter or copy that `save` wrote, and return its settings.

        Raises:
            ConfigError: the weights belong to another model, or are not finite.
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
    """Return the configured type of the weights; on a CPU float32, as half precision is slower there."""
    return DTYPES[config.actor.model.precision] if device.type != "cpu" else torch.float32


def load_base(config: ServeConfig, tokenizer: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return the served model, in evaluation mode, on its device.

    Args:
        config: the whole configuration.
        tokenizer: the tokenizer of the model.
        device: the device of the model.
        dtype: the type of the weights; None: see `served_dtype`.

    Raises:
        ConfigError: the model cannot be loaded, or lacks tokens of the tokenizer.
    """
    model: Any = make_model(config.actor, tokenizer, dtype or served_dtype(config, device))
    return model.to(device).eval()


def served_facts(model: Any, stops: tuple[int, ...]) -> ServedFacts:
    """Return the facts of the model that the server needs."""
    return ServedFacts(model.get_input_embeddings().weight.shape[0], stops)


def _file_of(settings: AdapterSettings) -> str:
    """Return the name of the weights' file that peft or transformers loads."""
    return WEIGHTS if settings.rank else "model.safetensors"


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a model and the buffers in its state, each once."""
    state, buffers = model.state_dict(), dict(model.named_buffers())
    return {**dict(model.named_parameters()), **{name: state[name] for name in state if name in buffers}}


def data_logprobs(policy: LanguagePolicy, data: Sequence[Datum], device: torch.device | str = "cpu") -> Tensor:
    """Return the log-probabilities of the targets of data, in the order of data, positions and K; float32 [A].

    Common prefixes of data are computed once if worth it, and so are equal targets at a position.
    """
    longest = max(len(datum.tokens) for datum in data)
    layout = RowLayout([datum.tokens.tolist() for datum in data], masks=policy.takes_masks(longest))
    positions: list[npt.NDArray[np.int64]] = []
    targets: list[npt.NDArray[np.int64]] = []
    for number, datum in enumerate(data):
        asked = datum.values["target_tokens"].astype(np.int64)
        positions.append(layout.places(number).numpy().repeat(asked.shape[1] if asked.ndim == 2 else 1))
        targets.append(asked.reshape(-1))
    pairs = np.stack([np.concatenate(positions), np.concatenate(targets)])
    once, again = np.unique(pairs, axis=1, return_inverse=True)
    predictors, wanted = (torch.from_numpy(part) for part in once)
    rows = layout.rows(predictors, wanted, device)
    return policy(rows).logprobs.index_select(0, torch.from_numpy(again.reshape(-1)).to(device))
