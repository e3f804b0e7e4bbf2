"""Rules for verl's supervised fine-tuning, which is recipe `sft_chat` here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rlinf_cli.importing.outcomes import Added, Leaf, LeftOut
from rlinf_cli.importing.rules.rules_verl import lora_of, model_folder, nested_lora, steps_of
from rlinf_cli.importing.rules.shared_rules import (
    HYDRA,
    Result,
    Rule,
    Table,
    Values,
    betas,
    drop,
    loggers,
    new,
    same,
    steps_or_never,
    to,
)
from rlinf_core.config.tree import Path

# Sections of verl, with the rlinf section of their keys.
SECTIONS: Final[dict[Path, Path]] = {
    ("model",): ("actor", "model"),
    ("optim",): ("actor", "optim"),
    ("engine",): ("actor", "fsdp_config"),
    ("trainer",): ("runner",),
}


def _epochs_or_steps(path: str) -> Rule:
    """Return the rule for an interval in steps, which verl may also give as `after_each_epoch`."""

    def rule(leaf: Leaf, values: Values) -> Result:
        written = values.of(leaf)
        if isinstance(written, str):
            return LeftOut(f"`{written}` is not a number of steps: `{path}` counts training steps")
        return steps_or_never(path)(leaf, values)

    return rule


def _truncation(leaf: Leaf, values: Values) -> Result:
    written = values.of(leaf)
    if written == "right":
        return new("data.overlong", "truncate", "a conversation that is too long is cut off at its end")
    if written == "left":
        return LeftOut("a conversation that is too long is skipped, or cut off at its end: `data.overlong`")
    return new("data.overlong", "skip", "a conversation that is too long is skipped and counted; verl fails")


VERL_SFT: Final[Table] = {
    **HYDRA,
    "data.train_files": to("data.train_data_paths"),
    "data.val_files": to("data.val_data_paths"),
    "data.train_batch_size": to("actor.global_batch_size"),
    "data.micro_batch_size_per_gpu": drop("`actor.max_tokens_per_micro_batch` bounds a pass, in tokens", quiet=True),
    "data.max_token_len_per_gpu": to("actor.max_tokens_per_micro_batch"),
    "data.max_length": to("runner.seq_length"),
    "data.truncation": _truncation,
    "data.apply_chat_template_kwargs": to("data.chat_template_kwargs"),
    "data.response_key": to("data.completion_key"),
    "model.path": model_folder("actor.model.model_path"),
    "model.partial_pretrain": model_folder("actor.model.model_path"),
    "model.tokenizer_path": model_folder("actor.tokenizer.tokenizer_model"),
    "model.enable_gradient_checkpointing": to("actor.fsdp_config.gradient_checkpointing"),
    "model.lora_rank": lora_of("actor.model.lora.rank", "model"),
    "model.lora_alpha": lora_of("actor.model.lora.alpha", "model"),
    "model.target_modules": lora_of("actor.model.lora.target_modules", "model"),
    **{f"model.lora.{name}": nested_lora(name, "model") for name in ("rank", "alpha", "target_modules")},
    "optim.betas": betas("actor.optim"),
    "optim.lr_warmup_steps": steps_of(
        "actor.optim.lr_warmup_steps", "a negative number leaves it to `lr_warmup_steps_ratio`"
    ),
    "optim.total_training_steps": steps_of("actor.optim.total_training_steps", "the run's last step is the default"),
    "trainer.logger": loggers("runner.logger.logger_backends"),
    "trainer.save_freq": _epochs_or_steps("runner.save_interval"),
    "trainer.test_freq": _epochs_or_steps("runner.val_check_interval"),
    "trainer.total_training_steps": steps_or_never("runner.max_steps"),
    "trainer.total_epochs": lambda leaf, values: same("runner.max_epochs", leaf),
    "trainer.seed": to("data.seed"),
    "trainer.nnodes": to("cluster.num_nodes"),
    "trainer.n_gpus_per_node": to("cluster.node_groups[0].accelerators.per_node"),
    "trainer.resume_mode": drop("`runner.resume_dir` names a checkpoint to continue from", quiet=True),
    "trainer.resume_from_path": drop("`runner.resume_dir` names an rlinf checkpoint; verl's are not read", quiet=True),
    "trainer.default_local_dir": drop("every run gets its own folder below `runner.logger.log_path`", quiet=True),
}


def sft_places(values: Values) -> Iterator[Added]:
    """Yield the placement of verl's fine-tuning: one group on all GPUs."""
    nodes, per_node = values.count("trainer.nnodes", 1), values.count("trainer.n_gpus_per_node", 1)
    why = "the file's machines"
    if values.get("trainer.nnodes") is None:
        yield Added(("cluster", "num_nodes"), nodes, "verl's default")
    if values.get("trainer.n_gpus_per_node") is None:
        yield Added(("cluster", "node_groups", 0, "accelerators", "per_node"), per_node, "verl's default")
    yield Added(("cluster", "node_groups", 0, "label"), "gpus", why)
    yield Added(("cluster", "node_groups", 0, "node_ranks"), f"0-{nodes - 1}" if nodes > 1 else 0, why)
    at = ("cluster", "component_placement", "actor")
    yield Added((*at, "node_group"), "gpus", "one group trains on all GPUs")
    gpus = nodes * per_node
    yield Added((*at, "placement"), f"0-{gpus - 1}" if gpus > 1 else "0", "one group trains on all GPUs")
