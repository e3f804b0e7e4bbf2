"""Models and tokenizers of transformers, loaded from folders without running their code, with peft's adapters.

Shared by recipes of language models and by policies that contain one.
"""

# transformers and peft are largely untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from recipes.sections.actor import ALL_LINEAR, LoraSettings
from recipes.sections.model_folders import SETTINGS, fault_of_adapter, read_object
from recipes.training.tied_weights import names_of_one_tensor, require_finite, settle_ties
from recipes.training.without_memory import seemingly_on_host
from rlinf_core import ConfigError
from rlinf_core.config.sections.values import ensure_here, stay_offline
from rlinf_core.foreign.files import read_bounded
from rlinf_core.process.requirements import install_command, require_version
from rlinf_core.suggest import excerpt

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Keys of config.json that may name a repository, from which transformers would fetch compiled code.
_IMPLEMENTATIONS: Final = tuple(f"{mark}{part}_implementation" for mark in ("", "_") for part in ("attn", "experts"))

# Flags of a model's outputs; transformers tests any value for truth, or compares it.
_FLAGS: Final = ("output_hidden_states", "output_attentions", "return_dict", "use_cache")
# Upper bounds of numbers in a configuration, by name; the first match counts. Without them, layers are made one by one,
# and weights in other sizes, before anything compares them with the weights in the folder.
_MOST: Final = (
    (re.compile(r".*(dropout|layerdrop|pdrop|drop_path).*"), 1),
    (re.compile(r"(.*_)?(layers|depth)"), 10_000),
    (re.compile(r".*vocab_size"), 1 << 24),
    (re.compile(r"(?!.*window)(.*_)?(size|dim|width|heads)"), 1 << 20),
)
_TARGETS: Final = "name linear layers in `lora.target_modules`, such as q_proj, or leave it out for all of them"
# The most characters of another library's error message that are shown: some quote the file.
_MOST_REASON: Final = 300


def cache_name(forward: Callable[..., object]) -> str:
    """Return the name of a model's cache, as an argument of its `forward` and in the output.

    transformers 5.24 renamed `past_key_values` to `cache`, and takes the former name until 5.40, with a warning.
    """
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def require_transformers() -> None:
    """Check that transformers can be imported.

    Raises:
        ConfigError: transformers is not installed in this interpreter, has an unsupported version, or refuses another
            installed package.
    """
    # Models are folders: no library may ask the hub about them.
    stay_offline()
    try:
        from transformers.utils import logging
    except ImportError as error:
        remedy = f"run `{install_command('transformers')}`"
        if isinstance(error, ModuleNotFoundError) and error.name == "transformers":
            raise ConfigError(
                "language models need the package transformers in the interpreter of every actor and rollout worker",
                help=remedy,
            ) from None
        why = first_line(error)
        raise ConfigError("the installed transformers cannot be imported", why=why, help=remedy) from error
    require_version("transformers")
    from transformers import dynamic_module_utils

    logging.disable_progress_bar()
    # Without this setting, transformers would ask whether to run code of the folder, which must not run.
    cast("Any", dynamic_module_utils).TIME_OUT_REMOTE_CODE = 0


def refuse_settings(folder: str) -> None:
    """Refuse a model that is an adapter, or whose configuration refers to remote code, or has an invalid setting that
    transformers accepts.

    Raises:
        ConfigError: it is such a model.
    """
    adapter = fault_of_adapter(Path(folder))
    if adapter is not None:
        raise ConfigError(adapter.message, help=adapter.help)
    for key, value in _settings_of(folder):
        names: list[Any] = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else [value]
        if key in _IMPLEMENTATIONS and any("/" in str(name) for name in names):
            raise ConfigError(
                f"the model in `{folder}` needs remote code, which is never run",
                where=str(Path(folder) / SETTINGS),
                why=f"`{key}` is `{value}`",
                help=f"remove `{key}` from the file",
            )
        wanted = _wanted(key, value)
        if wanted is not None:
            raise ConfigError(
                f"`{key}` of the model in `{folder}` is `{excerpt(repr(value), 40)}`",
                where=str(Path(folder) / SETTINGS),
                why=f"it should be {wanted}",
                help="copy the file again from its source",
            )


def _wanted(key: str, value: Any) -> str | None:
    """Return the values that a setting may have; None if its value is valid, or nothing is known about it."""
    if key in _FLAGS:
        return None if isinstance(value, bool | None) else "true or false"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    most = next((most for name, most in _MOST if name.fullmatch(key)), None)
    if most is None or (value <= most and (value >= 0 or most != 1)):
        return None
    return f"at most {most}" if most > 1 else "from 0 to 1"


def _settings_of(folder: str) -> Iterator[tuple[str, Any]]:
    """Yield names and values in a model's configuration, nested ones included; none if it cannot be read."""
    try:
        pending: list[Any] = [json.loads(read_bounded(Path(folder) / SETTINGS))]
    except (OSError, ValueError, RecursionError):
        # The next reader of the file reports the error.
        return
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += cast("list[Any]", part)
        elif isinstance(part, dict):
            pending += cast("dict[str, Any]", part).values()
            yield from cast("dict[str, Any]", part).items()


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder. No code of the folder is run.

    Raises:
        ConfigError: the tokenizer does not exist.
    """
    require_transformers()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    check_folder(folder)
    # For type qwen2 `AutoTokenizer` always returns the type's own tokenizer, even if the folder declares another one.
    # That tokenizer then drops entries of the vocabulary that are not byte-level.
    declared = read_object(Path(folder) / "tokenizer_config.json").get("tokenizer_class")
    kind = PreTrainedTokenizerFast if declared == "TokenizersBackend" else AutoTokenizer
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - of the folder's files, by several libraries
        raise ConfigError(
            f"`{folder}` has no tokenizer",
            why=first_line(error),
            help="a folder written by `save_pretrained` has tokenizer.json; or set `actor.tokenizer.tokenizer_model`",
        ) from None


def config_of(kind: Any, folder: str) -> Any:
    """Return the configuration of the model in a folder, loaded by `kind`, a class of transformers.

    Raises:
        ConfigError: the folder does not exist.
    """
    refuse_settings(folder)
    with judging_model(folder):
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_pretrained(
    loader: Any, folder: str, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the model in a folder, on the CPU.

    Args:
        loader: a class with `from_pretrained`, such as `AutoModelForCausalLM`.
        folder: the folder, as `save_pretrained` writes it, with weights in safetensors files.
        dtype: the type of the weights.
        trust_remote_code: whether to run code in the folder if it defines the model's class.

    Raises:
        ConfigError: the folder does not exist, or some weights are missing or not finite.
    """
    require_transformers()
    check_folder(folder)
    refuse_settings(folder)
    if not list(Path(folder).glob("*.safetensors")):
        raise ConfigError(
            f"the model folder `{folder}` has no weights",
            why="it has no *.safetensors file",
            help="copy the weights there; pickled files (*.bin) are not read",
        )
    with judging_model(folder):
        model, report = loader.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    # transformers only warns about missing weights and initializes them randomly: the model would act at random.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights in `{folder}` do not belong to a `{type(model).__name__}`",
            why=f"they lack `{missing[0]}`" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            help="copy the complete folder again, or name a folder of such a model",
        )
    require_finite(model.named_parameters(), folder)
    settle_ties(model, folder)
    return cast("PreTrainedModel", model)


@contextmanager
def judging_model(folder: str | None) -> Generator[None, None, None]:
    """Report other libraries' exceptions in this block as failures to load the model in a folder; None: no folder.

    Raises:
        ConfigError: the block raises such an exception.
    """
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # each class of configurations and models validates values in its own way
        if folder is None:
            raise
        raise ConfigError(
            f"the model in `{folder}` cannot be loaded",
            why=first_line(error),
            help=f"copy the complete folder again from its source, `{SETTINGS}` and weights",
        ) from None


def check_folder(folder: str) -> None:
    """Check that a model folder exists and holds only files.

    Raises:
        ConfigError: the folder does not exist, or contains a pipe, a socket or a device.
    """
    ensure_here(folder)
    if not os.path.isdir(folder):
        raise ConfigError(
            f"the model folder `{folder}` does not exist",
            help="name a folder on the worker's node, or a model of the HuggingFace Hub, `ORG/NAME`",
        )
    with os.scandir(folder) as entries:
        others = [entry for entry in entries if not entry.is_file() and not entry.is_dir()]
    odd = next((entry.name for entry in others if os.path.exists(entry)), None)
    if odd is not None:
        raise ConfigError(
            f"the model folder `{folder}` cannot be read",
            why=f"`{odd}` is a pipe, a socket or a device, for which its reader would wait",
            help="copy the folder again",
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, with the second if the first ends in a colon, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return excerpt(" ".join(lines[:2] if lines[0].endswith(":") else lines[:1]), _MOST_REASON)


def with_lora(model: PreTrainedModel, config: LoraSettings, task_type: str | None = "CAUSAL_LM") -> PeftModel:
    """Return the model with low-rank adapters; only the adapters are trained.

    Raises:
        ConfigError: peft is not installed, the model lacks a target layer, or an adapter could not be merged for
            writing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(
            "LoRA needs the package peft in the interpreter of the actors", help=f"run `{install_command('peft')}`"
        ) from None
    require_version("peft")
    kind = type(model).__name__
    layers = [name for name, _ in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())]
    named = config.target_modules if config.target_modules != ALL_LINEAR else ()
    for target in named:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            why = f"it has no layer `{excerpt(target, 60)}`"
            raise ConfigError(f"LoRA cannot be added to `{kind}`", why=why, help=_TARGETS)
    targets = list(named) or _linear_layers(model) or "all-linear"
    settings = LoraConfig(
        r=config.rank, lora_alpha=cast("Any", config.alpha), target_modules=targets, task_type=cast("Any", task_type)
    )
    try:
        # peft places an adapter, with initial values, on the device of its layer.
        with warnings.catch_warnings(), seemingly_on_host(model):
            # peft reads an attribute that transformers has renamed; users cannot act on the warning.
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            # A tied layer is refused below.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
            adapted = cast("PeftModel", get_peft_model(model, settings))
    except ValueError as error:
        raise ConfigError(f"LoRA cannot be added to `{kind}`", why=first_line(error), help=_TARGETS) from None
    why = _unmergeable(adapted) if task_type is not None else None
    if why is not None:
        raise ConfigError(f"LoRA cannot be added to `{kind}`", why=why, help=_TARGETS)
    return adapted


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of all linear layers of a model except its output layer.

    peft's own `all-linear` includes routers and experts, whose adapters no engine supports.
    """
    output = cast("Callable[[], nn.Module | None] | None", getattr(model, "get_output_embeddings", None))
    head = None if output is None else output()
    parts = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return [name for name, part in parts if isinstance(part, nn.Linear) and part is not head]


def _unmergeable(model: PeftModel) -> str | None:
    """Return why an adapter of a language model cannot be merged into the weights for engines and files."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    causal = model.get_base_model()
    names = names_of_one_tensor(causal.state_dict(keep_vars=True))
    shared = {id(causal.get_parameter(first)): same for first, *same in names.values() if same}
    for name, layer in cast("Iterable[tuple[str, nn.Module]]", causal.named_modules()):
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear):
            return f"`{name}` is of kind `{type(base).__name__}`, and adapters are merged into `Linear` layers alone"
        if id(base.weight) in shared:
            return f"`{name}` shares its weights with another layer (`tie_word_embeddings`): both would change"
    return None


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None, None, None]:
    """Let a model of `with_lora` compute without its adapters in this block.

    Unlike peft's `disable_adapter`, this leaves `requires_grad` of the adapters unchanged: FSDP2 takes the type of
    gradients from the weights that require any at its first pass.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # pyright: ignore[reportPrivateUsage]
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # pyright: ignore[reportPrivateUsage]


def transformer_layers(module: nn.Module) -> list[nn.Module]:
    """Return the layers of all transformers models in a module, in the module's order."""
    library = sys.modules.get("transformers.modeling_layers")
    if library is None:
        return []
    layers: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in layers)
        if isinstance(part, library.GradientCheckpointingLayer) and not inside:
            layers[name] = part
    return list(layers.values())


def checkpoint_layers(layers: Iterable[nn.Module], model: str) -> None:
    """Have layers recompute their activations in the backward pass instead of keeping them.

    Args:
        layers: layers of a transformers model.
        model: the name of the model, for the message.

    Raises:
        ConfigError: the model's layers do not support it.
    """
    for layer in layers:
        if not hasattr(layer, "gradient_checkpointing"):
            raise ConfigError(
                f"the layers of `{model}` do not support activation checkpointing",
                help="write `gradient_checkpointing: false`",
            )
        settable = cast("Any", layer)
        settable.gradient_checkpointing = True
        settable._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        # transformers tests only the layer's own flag; its parts stay in evaluation mode.
        layer.training = True
