"""Rules that need the layers and the tensors of a model's folder: which adapters it can have, and which engines.

They build the model without memory, by the functions that the workers call, so that a file is refused for what would
end its run.
"""

from __future__ import annotations

import os
from pathlib import Path as FilePath
from typing import Any, cast

from recipes.language.config import LanguageModelConfig
from recipes.sections.model_folders import SETTINGS, FolderFault, read_object
from rlinf_core import ConfigError
from rlinf_core.process.requirements import missing_modules

_PACKAGES = ["torch", "transformers"]


def fault_of_adapter(section: LanguageModelConfig) -> FolderFault | None:
    """Return why the layers of a section's `lora` get no adapters; None: they do, or the folder cannot be looked at."""
    lora, folder = section.adapter(), section.model_path
    if lora is None or folder is None or not os.path.isdir(folder) or missing_modules([*_PACKAGES, "peft"]):
        return None
    from recipes.language.models.load_model import hollow_causal
    from recipes.training.huggingface import with_lora

    try:
        model = hollow_causal(folder)
    except Exception:  # noqa: BLE001 - by the classes of transformers; rules about the folder say why
        return None
    try:
        with_lora(model, lora)
    except ConfigError as error:
        return FolderFault(f"{error.message}: {error.why}", error.help or "")
    return None


def fault_of_ties(folder: str) -> FolderFault | None:
    """Return why an engine that goes by config.json alone computes another model than the folder holds; None: it does
    not, or the folder cannot be looked at.
    """
    if not os.path.isdir(folder) or missing_modules(_PACKAGES):
        return None
    from recipes.training.reading.tensor_files import stored_tensors

    settings = read_object(FilePath(folder) / SETTINGS)
    text = settings.get("text_config", settings)
    size = cast("dict[str, Any]", text).get("vocab_size") if isinstance(text, dict) else None
    tensors = stored_tensors(FilePath(folder)) or {}
    # One for the embeddings, and one for the output.
    if sum(len(tensor.shape) > 1 and tensor.shape[0] == size for tensor in tensors.values()) < 2:
        return None
    from transformers import AutoConfig

    from recipes.language.models.load_model import hollow_causal
    from recipes.training.huggingface import config_of

    try:
        said, held = config_of(AutoConfig, folder), cast("Any", hollow_causal(folder).config)
    except Exception:  # noqa: BLE001 - as above
        return None
    if not said.tie_word_embeddings or held.tie_word_embeddings:
        return None
    return FolderFault(
        f"`tie_word_embeddings` of config.json in `{folder}` is true, and the weights of the output layer differ from"
        " the embeddings: this engine would compute with the embeddings",
        f"write `tie_word_embeddings: false` in {SETTINGS} of the folder, or `backend: torch`",
    )
