"""Construction of the engine that `rollout.backend` names."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import torch

from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.rollout_config import BACKENDS
from recipes.language.engines.engine import Engine
from recipes.language.engines.stand_in_engine import StandInEngine
from recipes.language.models.load_model import make_model
from recipes.training.typed_tensors import DTYPES
from rlinf_core.process import pacing
from rlinf_core.runners.storage.first_contact import FirstContact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def make_engine(
    config: LanguageConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
    device: torch.device,
    contact: FirstContact | None = None,
    owner: str = "rollout",
) -> Engine:
    """Return the engine that `rollout.backend` names, with its model; in a rehearsal, a stand-in.

    Args:
        config: the whole configuration.
        tokenizer: the tokenizer of the model.
        stop_token_ids: tokens that end every answer.
        device: the device of the model.
        contact: the start-up checks to which the engine's check is added.
        owner: the worker that owns the engine, for errors.

    Raises:
        ConfigError: the engine's package is missing, the model cannot be loaded, or the server does not answer.
    """
    if pacing.active is not None:
        return StandInEngine()
    name = BACKENDS[config.rollout.backend].name
    rollout, lora = config.rollout, config.actor.model.adapter()
    # Use float32 on a CPU, where half precision is slower.
    dtype = DTYPES[config.actor.model.precision] if device.type != "cpu" else torch.float32
    common: dict[str, Any] = {
        "stop_token_ids": stop_token_ids,
        "decode": tokenizer.decode,
        "max_running_tokens": rollout.max_running_tokens,
        "max_sequence_tokens": config.runner.seq_length,
        "adapter_scale": lora.alpha / lora.rank if lora else 1.0,
    }
    if name == "torch":
        from recipes.language.engines.own.engine_check import check_engine
        from recipes.language.engines.own.torch_engine import TorchEngine
        from recipes.language.models.plain_check import PLAIN

        model = make_model(config.actor, tokenizer, dtype)
        model.to(device)  # pyright: ignore[reportArgumentType] - a decorator of transformers hides the method
        what = f"greedy answers of `{type(model).__name__}` by the engine `torch`"
        (contact or FirstContact()).compare(what, PLAIN, lambda: check_engine(model))
        return TorchEngine(model, **common)
    folder = config.actor.model.model_path
    if folder is None:
        return _with_built_model(config, tokenizer, dtype, common, owner)
    return _of_folder(config, folder, dtype, common, owner)


def _of_folder(config: LanguageConfig, folder: str, dtype: torch.dtype, common: dict[str, Any], owner: str) -> Engine:
    """Return an external engine with the model of a folder."""
    rollout = config.rollout
    if BACKENDS[rollout.backend].name == "server":
        from recipes.language.engines.server_engine import ServerEngine

        return ServerEngine(rollout.server, folder, dtype=dtype, **common)
    shared: dict[str, Any] = {
        **common,
        "dtype": dtype,
        "temperature": rollout.sampling_params.temperature,
        **dict(rollout.vllm),
        "options": rollout.arguments,
    }
    from recipes.language.engines.vllm_engine import VllmEngine

    if rollout.enable_offload:
        shared["options"] = {"enable_sleep_mode": True, **rollout.arguments}
    lora = config.actor.model.adapter()
    return VllmEngine(folder, owner=owner, adapter_rank=lora.rank if lora else 0, **shared)


def _with_built_model(
    config: LanguageConfig, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, common: dict[str, Any], owner: str
) -> Engine:
    """Return an external engine with a tiny random model, in a folder that is deleted with the engine."""
    folder = tempfile.mkdtemp(prefix="rlinf-model-")
    try:
        make_model(config.actor, tokenizer, dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = _of_folder(config, folder, dtype, common, owner)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(engine, shutil.rmtree, folder, ignore_errors=True)
    return engine
