"""A LoRA adapter as vLLM loads it: from a folder, beside weights that stay as they are."""

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

# Ranks that vLLM reserves memory for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, LARGEST_RANK)
_NAME, _NUMBER = "policy", 1


def reserved_rank(rank: int) -> int:
    """Return the smallest rank that vLLM reserves memory for and that adapters of `rank` fit in."""
    return next(known for known in _RANKS if known >= rank)


class VllmAdapter:
    """The one adapter of an engine, replaced by each update.

    Args:
        rank: the rank of the adapter.
        scale: alpha / rank.
        dtype: the type in which it is written.
    """

    def __init__(self, rank: int, scale: float, dtype: torch.dtype) -> None:
        self._rank = rank
        self._scale = scale
        self._dtype = dtype
        self._folder = Path(tempfile.mkdtemp(prefix="rlinf-adapter-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        # What requests carry; None: nothing has been loaded.
        self.request: Any = None

    @staticmethod
    def serves(rank: int, options: Mapping[str, Any]) -> bool:
        """Return whether vLLM can take an adapter of a rank, and its further arguments let it."""
        return 0 < rank <= _RANKS[-1] and options.get("enable_lora") is not False

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `vllm.LLM`."""
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": reserved_rank(self._rank)}

    def load(self, llm_engine: Any, weights: Mapping[str, Tensor]) -> None:
        """Replace the adapter in an engine of vLLM by weights named as peft names them.

        Raises:
            RuntimeError: vLLM did not take it.
        """
        import safetensors.torch

        adapter_request: Any = importlib.import_module("vllm.lora.request").LoRARequest
        renamed = {name.replace(".default.weight", ".weight"): value for name, value in weights.items()}
        # Copies, since safetensors refuses tensors that share memory, as those of one message do.
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
        (self._folder / "adapter_config.json").write_text(json.dumps(settings))
        # vLLM finds an adapter by its number, and reads the folder again only where it is asked to.
        asked = adapter_request(_NAME, _NUMBER, str(self._folder), load_inplace=True)
        if not llm_engine.add_lora(asked):
            raise RuntimeError("vLLM did not load the LoRA adapter")
        self.request = adapter_request(_NAME, _NUMBER, str(self._folder))
