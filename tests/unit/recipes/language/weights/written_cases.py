"""Models of many families, trained for a step, written, and loaded again.

    python -m tests.unit.recipes.language.weights.written_cases RANK FOLDER

`outcome` carries one case out; the command does so for all of them, as one of two ranks.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import transformers
from torch import nn

import recipes.language.weights.written_model as written_model
from recipes.language.learning.warm_start import begin_training
from recipes.language.models.load_model import built_tokenizer, hollow_causal
from recipes.language.models.packing import RowLayout
from recipes.language.weights.model_export import export_state
from recipes.language.weights.written_model import answer
from rlinf_core import ConfigError, load_job
from rlinf_core.runners.storage.first_contact import FirstContact
from tests.unit.recipes.two_processes import as_rank

_SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
_SIZES.update({"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128})
_SIZES.update({"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1})
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Cohere": {"logit_scale": 1.0},
    "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128},
    "GPTNeoX": {},
    "Gemma2": {"head_dim": 16},
    "Granite": {},
    "Llama": {},
    "Mistral": {},
    "Mixtral": _EXPERTS,
    "Olmo2": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
}
TIES = ("tied", "untied", "unequal")
# Layers that get adapters; `all`: what the default chooses, `weights`: none, all weights are trained.
KINDS = ("weights", "all", "attention", "mlp", "head", "embeddings", "norm")


class Case(NamedTuple):
    """A family of models, how its output layer is stored, and what of it is trained."""

    architecture: str
    ties: str
    kind: str

    @property
    def text(self) -> str:
        """The case as a name of files and tests."""
        return "-".join(self)


CASES = [Case(*case) for case in product(ARCHITECTURES, TIES, KINDS)]


def save(architecture: str, ties: str, folder: Path) -> None:
    """Write a model with random weights and a tokenizer; of `unequal` the configuration says `tied`."""
    config = getattr(transformers, f"{architecture}Config")(
        **{**_SIZES, **ARCHITECTURES[architecture]}, tie_word_embeddings=ties == "tied"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    built_tokenizer().save_pretrained(str(folder))
    if ties == "unequal":
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))


def layer_of(model: Any, kind: str) -> str:
    """Return the name of a layer of a kind, as `target_modules` takes it."""
    if kind in ("head", "embeddings"):
        wanted = model.get_output_embeddings() if kind == "head" else model.get_input_embeddings()
        return next(name for name, layer in model.named_modules() if layer is wanted).rpartition(".")[2]
    words = {"attention": ("attn.", "attention."), "mlp": ("mlp.",), "norm": ("norm", "ln_")}[kind]
    for name, layer in model.named_modules():
        if any(word in name for word in words) and (hasattr(layer, "weight") if kind == "norm" else _is_matrix(layer)):
            return str(name).rpartition(".")[2]
    raise LookupError(kind)


def _is_matrix(layer: Any) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def outcome(case: Case, folder: Path, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Train a step and write the model; return `refused`, why, or the `difference` from what transformers loads, the
    `logprobs` that the actor computes, and how far the step has `moved` them.

    Args:
        case: the case.
        folder: for the model that is written.
        rank, world_size: of the rank, which all call together.
    """
    source = folder / f"source {case.architecture} {case.ties}"
    if rank == 0:
        save(case.architecture, case.ties, source)
    if world_size > 1:
        dist.barrier()
    model = hollow_causal(str(source))
    overrides = [f"actor.model.model_path={source}", "actor.warm_start.steps=0"]
    if case.kind == "all":
        overrides.append("actor.model.lora={rank: 2, alpha: 8}")
    elif case.kind != "weights":
        try:
            target = layer_of(model, case.kind)
        except LookupError:
            return {"refused": "no such layer"}
        overrides.append(f"actor.model.lora={{rank: 2, alpha: 8, target_modules: [{target}]}}")
    config = cast("Any", load_job("math/sums-laptop", tuple(overrides)).config)
    contact, tokenizer = FirstContact("actor"), built_tokenizer()
    try:
        policy, state = begin_training(
            config, tokenizer, contact, device=torch.device("cpu"), rank=rank, world_size=world_size, is_sent=bool
        )
    except ConfigError as error:
        return {"refused": f"{error.message}: {error.why}"}
    before = written_model.expected_logprobs(policy, torch.float32).logprobs
    # B of a new adapter is 0: after the first step only B is another one.
    for _ in range(2):
        _step(state)
    after = written_model.expected_logprobs(policy, torch.float32).logprobs
    export_state(state, config.actor, tokenizer, str(folder / case.text), contact, writes=rank == 0)
    checks = [check for check in contact.take() if check.with_ == written_model.LOADED]
    return {
        "difference": checks[0].largest_difference if rank == 0 else None,
        "logprobs": after,
        "moved": max(abs(one - other) for one, other in zip(before, after, strict=True)),
    }


def _step(state: Any) -> None:
    tokens = torch.arange(2, 42)
    layout = RowLayout([tokens[:-1].tolist()], masks=False)
    loss = -state.strategy.module(layout.rows(layout.places(0), tokens[1:])).logprobs.mean()
    loss.backward()
    state.strategy.finish_gradients()
    with torch.no_grad():
        for weight in state.policy.parameters():
            if weight.grad is not None:
                weight -= 0.5 * weight.grad
                weight.grad = None


def all_outcomes(rank: int, folder: Path) -> dict[str, Any]:
    # What was written is loaded here: a process of its own takes seconds to import transformers.
    cast("Any", written_model)._answer_of = lambda folder, tokens, seconds: answer(str(folder), tokens)
    return {case.text: outcome(case, folder, rank, 2) for case in CASES}


if __name__ == "__main__":
    as_rank(all_outcomes)
