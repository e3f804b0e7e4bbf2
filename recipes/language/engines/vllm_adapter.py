"""A LoRA adapter that vLLM loads from a folder, beside unchanged base weights."""

from __future__ import annotations

import importlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from recipes.language.config.rollout_config import LARGEST_RANK
from recipes.sections.model_folders import ADAPTED

# The adapter ranks that vLLM can reserve memory for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
_NAME, _NUMBER = "policy", 1


def reserved_rank(rank: int) -> int:
    """Return the smallest rank that vLLM can reserve memory for and that is at least `rank`."""
    return next(known for known in _RANKS if known >= rank)


class VllmAdapter:
    """The only adapter of an engine, replaced by each update.

    Args:
        rank: the rank of the adapter.
        scale: alpha / rank.
        dtype: the type of the written adapter.
    """

    def __init__(self, rank: int, scale: float, dtype: torch.dtype) -> None:
        self._rank = rank
        self._scale = scale
        self._dtype = dtype
        self._folder = Path(tempfile.mkdtemp(prefix="rlinf-adapter-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        # vLLM's reference to the adapter, which requests carry; None until one is loaded.
        self.request: Any = None

    @staticmethod
    def serves(rank: int, options: Mapping[str, Any]) -> bool:
        """Return whether vLLM supports an adapter of this rank, and `options` do not forbid it."""
        return 0 < rank <= _RANKS[-1] and options.get("enable_lora") is not False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` for the adapter."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": reserved_rank(self._rank)}

    def load(self, llm_engine: Any, weights: Mapping[str, Tensor]) -> None:
        """Replace the adapter in an engine of vLLM by weights with peft's names.

        Raises:
            RuntimeError: vLLM did not load the adapter.
        """
        import safetensors.torch

        adapter_request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        renamed = {name.replace(".default.weight", ".weight"): value for name, value in weights.items()}
        # Copy: safetensors refuses tensors that share memory, as those of one message do.
        tensors = {name: value.to("cpu", self._dtype, copy=True).contiguous() for name, value in renamed.items()}
        cast("Any", safetensors.torch).save_file(tensors, self._folder / "adapter_model.safetensors")
        layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self._rank,
            "lora_alpha": self._scale * self._rank,
            "target_modules": sorted(layers),
            "bias": "none",
        }
        (self._folder / ADAPTED).write_text(json.dumps(settings))
        # vLLM knows an adapter by its number, and rereads the folder only if asked to.
        asked = adapter_request(_NAME, _NUMBER, str(self._folder), load_inplace=True)
        if not llm_engine.add_lora(asked):
            raise RuntimeError("vLLM did not load the LoRA adapter")
        self.request = adapter_request(_NAME, _NUMBER, str(self._folder))
