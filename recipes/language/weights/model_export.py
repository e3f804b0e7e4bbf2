"""Trained models as folders that transformers and engines load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from recipes.language.config import LanguageActorConfig
from recipes.language.engines.own.merged_adapter import MergedAdapter
from recipes.language.models.load_model import make_model
from recipes.training.dtypes import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_POLICY, _PEFT = "model.", "model.base_model.model."


@torch.no_grad()
def export(
    weights: Mapping[str, Tensor], config: LanguageActorConfig, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write config, safetensors and tokenizer; a LoRA adapter is merged. Written aside and renamed.

    Args:
        weights: the `state_dict` of a `LanguagePolicy`, in one piece.
        config: of the actor, which decides the architecture.
        tokenizer: of the model.
        folder: to write; replaced where it is there.
    """
    model = make_model(config, tokenizer, DTYPES[config.model.precision])
    lora = config.model.adapter()
    if lora is None:
        plain = {name.removeprefix(_POLICY): value for name, value in weights.items() if name.startswith(_POLICY)}
        model.load_state_dict(plain, strict=False)
    else:
        adapter = {name.removeprefix(_POLICY): value for name, value in weights.items() if ".lora_" in name}
        MergedAdapter(model, lora.alpha / lora.rank).load(adapter.items())
    # A name of ours for the attention function must not be in a file that others read.
    cast("Any", model.config)._attn_implementation = "sdpa"
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(str(aside))
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
