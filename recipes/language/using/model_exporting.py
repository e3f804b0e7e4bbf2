"""Export of a checkpoint as a folder that transformers and engines load: `rlinf export` calls `export_checkpoint`."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from recipes.language.config.described_models import ModelJobConfig
from recipes.language.loop.model_checkpoints import MODEL, STATE
from recipes.language.models.load_model import make_model, make_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.language.weights.model_export import export
from recipes.language.weights.written_model import check_written, expected_logprobs
from recipes.training.huggingface import with_lora
from recipes.training.typed_tensors import DTYPES
from recipes.training.weights.training_state import load_weights
from rlinf_core import CheckpointError, ConfigError, RLinfError
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND: Final = "safetensors"


def export_checkpoint(config: ModelJobConfig, checkpoint: Path, folder: Path, kind: str) -> dict[str, Any]:
    """Write the model of a checkpoint as config, safetensors and tokenizer; a LoRA adapter is merged.

    Args:
        config: the configuration of the run.
        checkpoint: a folder `global_step_N`.
        folder: a new folder.
        kind: the format; only `safetensors` is supported.

    Returns:
        See `Export`; `difference` is the largest of a log-probability between the folder's model and the policy.

    Raises:
        ConfigError: another format is asked for, or the base model does not exist.
        CheckpointError: the checkpoint cannot be read.
        RLinfError: the folder exists.
    """
    if kind != KIND:
        raise ConfigError(
            f"a language model cannot be exported as `{kind}`",
            help=f"write `--format {KIND}`: a folder of transformers, which vLLM loads, too",
        )
    if folder.exists():
        raise RLinfError("the export folder already exists", where=str(folder), help="name another with `-o`")
    difference = write_model(config, checkpoint, folder)
    return {
        "folder": str(folder),
        "format": kind,
        "files": sorted(file.name for file in folder.iterdir()),
        "inputs": {},
        "outputs": {},
        "difference": difference.largest,
    }


def write_model(config: ModelJobConfig, checkpoint: Path, folder: Path) -> Difference:
    """Write the folder, and return the largest difference between its model's log-probabilities and the policy's;
    raises as `export_checkpoint` does.
    """
    if not (checkpoint / STATE).is_dir():
        if not (checkpoint / MODEL).is_dir():
            raise CheckpointError("the checkpoint has no model", where=str(checkpoint))
        shutil.copytree(checkpoint / MODEL, folder)
        return Difference(0.0, note="copied")
    tokenizer = make_tokenizer(config.actor)
    model, lora = make_model(config.actor, tokenizer), config.actor.model.adapter()
    policy = LanguagePolicy(model if lora is None else cast("PreTrainedModel", with_lora(model, lora))).eval()
    load_weights(checkpoint, policy)
    expected, differences = expected_logprobs(policy, DTYPES[config.actor.model.precision]), list[Difference]()

    def check(aside: Path, fingerprints: Mapping[str, str]) -> None:
        differences.append(check_written(aside, fingerprints, expected))

    export(policy.state_dict().items(), config.actor, tokenizer, folder, check)
    (difference,) = differences
    return difference


@contextmanager
def model_of(config: ModelJobConfig, checkpoint: Path | None) -> Generator[str, None, None]:
    """Yield the folder with the model of a checkpoint, or without one, of the configuration.

    A folder that is created for this is deleted afterwards.

    Raises:
        ConfigError: neither a checkpoint nor a model folder is named.
        CheckpointError: the checkpoint cannot be read.
    """
    if checkpoint is None:
        named = config.actor.model.model_path
        if named is None:
            raise ConfigError(
                "no weights are named",
                where="actor.model.model_path",
                help="name a run or a checkpoint with `--checkpoint`, or a model folder with `actor.model.model_path`",
            )
        yield named
    elif (checkpoint / MODEL).is_dir():
        yield str(checkpoint / MODEL)
    else:
        with TemporaryDirectory(prefix="rlinf-model-") as made:
            write_model(config, checkpoint, Path(made) / MODEL)
            yield str(Path(made) / MODEL)


def with_folder(actor: Any, folder: str) -> Any:
    """Return a section `actor` whose model is that of a folder, without adapters."""
    model = actor.model.model_copy(update={"model_path": folder, "lora": None})
    return actor.model_copy(update={"model": model})


def computing_device() -> torch.device:
    """Return the accelerator of this process if there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
