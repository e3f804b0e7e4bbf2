"""The memory estimate of a language job, computed from its configuration and the model's config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch

from recipes.language.config.described_models import (
    TEACHER_STEPS,
    critic_model,
    judge_job,
    reference_model,
    teacher_model,
)
from recipes.language.config.language_config import LanguageActorConfig, LanguageConfig, LanguageModelConfig
from recipes.language.config.problem_config import EVALUATED_AT_ONCE
from recipes.language.config.rollout_config import BACKENDS, JUDGED_TOKENS, MIN_SAVED
from recipes.language.loop.worker_groups import optional_components
from recipes.language.models.load_model import built_model, make_tokenizer
from recipes.language.models.packing import MOST_OTHERS
from recipes.language.models.policy import CHUNK_NUMBERS
from recipes.sections.actor import FsdpConfig
from recipes.training.huggingface import check_folder, config_of, first_line, require_transformers, with_lora
from recipes.training.tied_weights import settle_ties
from recipes.training.typed_tensors import DTYPES
from recipes.training.weights.weight_sync import PIECE_BYTES
from recipes.training.without_memory import (
    BLOCK_ON_ACCELERATOR,
    FORWARD,
    TORCH,
    TRAINING,
    TRANSFORMERS,
    WORKER,
    block_parameters,
    computing_layers,
    held_in_blocks,
    parameter_bytes,
    shard_parts,
)
from rlinf_core import ConfigError
from rlinf_core.job.recipe import ProcessForecast
from rlinf_core.runners.runner import NEVER

# The number of float32 tensors with the size of the logits, in training and sampling.
_LOGITS: Final = 5
# The numbers of pieces of weights in transfer, and of gathered layers, at a time.
_PIECES: Final = 3
_LAYERS: Final = 2
# The dimensions of a tensor of all experts' matrices: expert, and two of the matrix.
_EXPERTS_NDIM: Final = 3


# Bytes per token of a training batch: token, mask, log-probability, version, reward, advantage, and old
# log-probability. A batch exists twice while it is transferred.
_BATCH_TOKEN: Final = 2 * (8 + 1 + 4 + 8 + 4 + 4 + 4)
# Bytes per drawn token, as Python objects, and per token of an engine's row.
_DRAWN_TOKEN: Final = 3 * 8 + 24 + 28
_ROW_TOKEN: Final = 8 + 4 + 8
# Distinct prompt tokens that the engine computes in one pass.
_PREFILL_TOKENS: Final = 8192
# Bytes in memory per byte of a problem file.
_READ: Final = 4
_ON_CPU: Final = "an engine on the CPU computes in float32: weights, keys and values are twice as large there"
_BASE: Final = WORKER + TORCH + TRANSFORMERS


class Sizes(NamedTuple):
    """The sizes that the estimates of all processes share.

    Attributes:
        config: the whole configuration.
        counts: the number of processes of each component.
        model: the model that the actors train.
        prompt, drawn, longest: maximum tokens of a prompt, of an answer, and of both together.
    """

    config: LanguageConfig
    counts: Mapping[str, int]
    model: LanguageModelSizes
    prompt: int
    drawn: int
    longest: int

    @classmethod
    def of(cls, config: LanguageConfig, world_sizes: Mapping[str, int | None]) -> Sizes:
        """Return the sizes of a job; raises as `model_sizes` does."""
        room = config.runner.seq_length
        prompt, drawn = min(config.data.max_prompt_length, room - 1), min(config.longest_answer, room - 1)
        counts = {name: count or 1 for name, count in world_sizes.items()}
        return cls(config, counts, model_sizes(config.actor), prompt, drawn, min(room, prompt + drawn))

    @property
    def answers(self) -> int:
        """Number of answers of a training step."""
        return self.config.data.rollout_batch_size * self.config.algorithm.group_size

    def count(self, component: str) -> int:
        """Return the number of processes of a component."""
        return self.counts.get(component, 1)

    def batch(self, component: str) -> int:
        """Return the bytes of a process's share of a step's answers, as a training batch."""
        return -(-self.answers // self.count(component)) * self.longest * _BATCH_TOKEN

    def objects(self, component: str) -> int:
        """Return the bytes of a process's share of a step's answers, as Python objects."""
        return -(-self.answers // self.count(component)) * self.drawn * _DRAWN_TOKEN

    def micro(self, component: str, minibatches: int = 1) -> int:
        """Return the tokens of the fullest pass over a share of the answers."""
        actor, group = self.config.actor, self.config.algorithm.group_size
        apart = group * self.longest
        # With attention masks, several answers share one copy of the prompt.
        stems = -(-group * self.drawn // (MOST_OTHERS * self.prompt))
        packed = min(apart, stems * self.prompt + group * self.drawn)
        every = -(-self.config.data.rollout_batch_size // (self.count(component) * minibatches)) * packed
        most = min(actor.max_tokens_per_micro_batch, (actor.micro_batch_size or self.answers) * self.longest)
        return min(every, max(most, self.longest))

    def process(
        self, component: str, parts: Mapping[str, int], *notes: str, shared: int = 0, offloads: bool = False
    ) -> ProcessForecast:
        """Return the estimate of a component, without empty parts."""
        there = {part: size for part, size in parts.items() if size}
        return ProcessForecast(component, self.count(component), there, shared, offloads, notes)


def forecast(config: LanguageConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory estimate of each process of a job, see `Recipe.memory`; raises as `model_sizes` does."""
    return component_forecasts(Sizes.of(config, world_sizes))


def component_forecasts(sizes: Sizes) -> list[ProcessForecast]:
    """Return the estimates of the components of every language recipe, and of the job's optional ones."""
    makers = {"critic": _critic, "reference": _reference, "teacher": _teacher, "judge": _judge}
    return [
        _actor(sizes),
        _rollout(sizes),
        _reward(sizes),
        *(makers[name](sizes) for name in optional_components(sizes.config)),
    ]


def _actor(sizes: Sizes) -> ProcessForecast:
    model, actor, count = sizes.model, sizes.config.actor, sizes.count("actor")
    # An engine with a sender of its own keeps the memory of the received weights.
    keeps = BACKENDS[sizes.config.rollout.backend].name == "torch" and sizes.count("rollout") <= count
    keeps = keeps and actor.model.adapter() is None and actor.model.precision == "fp32"
    sent = model.pieces + (model.sent if keeps else 0)
    parts, on_accelerator = _learning(sizes, "actor", model)
    parts["sent weights"] = sent
    shared = count * (sizes.batch("actor") + sent)
    process = sizes.process("actor", parts, shared=shared, offloads=actor.enable_offload)
    return process._replace(on_accelerator=on_accelerator)


def _critic(sizes: Sizes) -> ProcessForecast:
    actor, section = sizes.config.actor, critic_model(sizes.config)
    model = model_sizes(actor, section, actor.fsdp_config)
    parts, on_accelerator = _learning(sizes, "critic", model)
    return sizes.process("critic", parts, offloads=actor.enable_offload)._replace(on_accelerator=on_accelerator)


def _learning(sizes: Sizes, component: str, model: LanguageModelSizes) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parts of a training worker: its shard, the answers, and what FSDP2 gathers while computing.

    The second result has the parts whose size differs on an accelerator.

    FSDP2 gathers the shards of a layer while another layer computes.
    """
    actor, count = sizes.config.actor, sizes.count(component)
    tokens = sizes.micro(component, sizes.config.minibatches)
    logits = model.logits(tokens) if component == "actor" else 0
    parts = {
        "base": _BASE + TRAINING,
        **shard_parts(model.weights, model.trained, actor.fsdp_config, count, state_dtype=actor.optim.state_dtype),
        "answers": sizes.batch(component),
        "activations": tokens * model.learning + logits,
    }
    parts |= gathered_parts(model, actor.model.precision, actor.fsdp_config, count, parts["activations"])
    return parts, {"activations": tokens * model.learning_on_accelerator + logits}


def gathered_parts(
    model: LanguageModelSizes, precision: str, fsdp: FsdpConfig, count: int, activations: int
) -> dict[str, int]:
    """Return the unsharded tensors that a training worker holds while computing; empty without shards.

    Gradients are summed over ranks in float32, layer by layer. Gradients of weights outside of layers, such as the
    output matrix, are summed after the pass, when its activations are freed.

    Args:
        model: the sizes of the model.
        precision: the precision of the computation.
        fsdp: the settings of sharding.
        count: the number of workers.
        activations: the bytes of a pass's activations.
    """
    if precision == "fp32" and (count == 1 or fsdp.sharding_strategy == "no_shard"):
        return {}
    width = DTYPES[precision].itemsize
    within = model.apart + model.layer * (width + 4) // width
    at_the_end = model.apart * (width + 4) // width - activations
    return {"gathered weights": model.gathered, "gathered gradients": min(model.trained, max(within, at_the_end))}


def _reference(sizes: Sizes) -> ProcessForecast:
    config = sizes.config
    return _frozen(sizes, "reference", reference_model(config), config.actor.warm_start.steps)


def _teacher(sizes: Sizes) -> ProcessForecast:
    config = sizes.config
    return _frozen(sizes, "teacher", teacher_model(config), TEACHER_STEPS)


def _frozen(sizes: Sizes, component: str, section: LanguageModelConfig, warm_start_steps: int) -> ProcessForecast:
    """Return the estimate of a worker with a frozen model."""
    actor = sizes.config.actor
    model = model_sizes(actor, section)
    tokens = sizes.micro(component)
    shards = sizes.count(component) if actor.fsdp_config.sharding_strategy != "no_shard" else 1
    parts = {
        "base": _BASE,
        "warm start": 3 * model.weights if section.model_path is None and warm_start_steps else 0,
        "weights": model.engine // shards,
        "answers": sizes.batch(component),
        "activations": tokens * model.predicting + model.logits(tokens),
    }
    return sizes.process(component, parts, offloads=actor.enable_offload)


def _judge(sizes: Sizes) -> ProcessForecast:
    """Return the estimate of a judge; with the engine `torch`, for the maximum of running tokens."""
    config, job = sizes.config, judge_job(sizes.config)
    judge, model = config.judge, model_sizes(job.actor)
    parts = {"base": _BASE}
    if BACKENDS[judge.backend].name != "torch":
        return sizes.process("judge", parts, *_notes_of_engine(job, model))
    asked = config.reward.judging
    every = -(-sizes.answers // sizes.count("judge")) * asked.seq_length
    tokens = max(asked.seq_length, min(every, JUDGED_TOKENS))
    rows = max(1, tokens // asked.seq_length)
    parts |= {
        "weights": model.engine,
        "keys and values": tokens * model.token + rows * asked.max_new_tokens * _ROW_TOKEN,
        "activations": min(_PREFILL_TOKENS, tokens) * model.predicting + model.logits(rows),
    }
    notes = (_ON_CPU,) if config.actor.model.precision != "fp32" else ()
    return sizes.process("judge", parts, *notes)


def _rollout(sizes: Sizes) -> ProcessForecast:
    """Return the estimate of a rollout worker; with the engine `torch`, the KV cache of all answers at once."""
    config, model, count = sizes.config, sizes.model, sizes.count("rollout")
    data, runner, rollout, longest = config.data, config.runner, config.rollout, sizes.longest
    files = (Path(name) for name in (*data.train_files, *data.val_data_paths))
    read = _READ * sum(file.stat().st_size for file in files if file.is_file())
    parts = {"base": _BASE, "problems": read, "answers": sizes.objects("rollout")}
    if BACKENDS[rollout.backend].name != "torch":
        return sizes.process("rollout", parts, *_notes_of_engine(config, model))
    rows = -(-sizes.answers * (1 + runner.max_staleness) // count)
    group = config.algorithm.group_size
    if runner.val_check_interval != NEVER or runner.only_eval:
        judged = -(-min(data.val_size, EVALUATED_AT_ONCE) * data.val_samples // count)
        rows, group = (judged, data.val_samples) if judged > rows else (rows, group)
    # The engine stores a prompt once per group if copies would take much memory.
    stored = (group - 1) * sizes.prompt >= MIN_SAVED
    own = sizes.drawn if stored else longest
    kept = rows * own + (-(-rows // group) * sizes.prompt if stored else 0)
    if rollout.max_running_tokens:
        kept = min(kept, max(longest, rollout.max_running_tokens))
        rows = max(1, min(rows, rollout.max_running_tokens // own))
    prompts = rows * sizes.prompt // config.algorithm.group_size
    parts |= {
        "weights": model.engine,
        "merged adapter": model.adapted,
        "received weights": model.pieces,
        "keys and values": kept * model.token + rows * sizes.drawn * _ROW_TOKEN,
        "activations": min(_PREFILL_TOKENS, prompts) * model.predicting + model.logits(rows),
    }
    notes = (_ON_CPU,) if config.actor.model.precision != "fp32" else ()
    shared = count * sizes.objects("rollout")
    return sizes.process("rollout", parts, *notes, shared=shared, offloads=rollout.enable_offload)


def _notes_of_engine(config: LanguageConfig, model: LanguageModelSizes) -> tuple[str, ...]:
    """Return notes on a third-party engine."""
    rollout = config.rollout
    if rollout.backend == "server":
        return ("the server that answers is not counted",)
    share = f"{rollout.vllm.gpu_memory_utilization:.0%} of each of its accelerators (`gpu_memory_utilization`)"
    return (
        f"{rollout.backend} takes {share}: weights of {model.engine / 2**30:.1f} GiB, and for each token"
        f" {model.token / 2**10:.0f} KiB of keys and values",
        f"what {rollout.backend} takes of the host's memory is not counted",
    )


def _reward(sizes: Sizes) -> ProcessForecast:
    kind = sizes.config.reward.reward_type
    apart = kind in ("math", "reasoning_gym") or ":" in kind
    notes = (f"the process in which each reward worker scores by `{kind}` is not counted",) if apart else ()
    parts = {"base": WORKER + TORCH, "answers": sizes.objects("reward") + sizes.batch("reward")}
    return sizes.process("reward", parts, *notes)


class LanguageModelSizes(NamedTuple):
    """Sizes of a language model, in bytes.

    Attributes:
        weights, trained: all weights as stored for training, and the trained ones.
        sent, pieces: the weights sent to an engine, in the type of the transfer, and the part in transfer at a time.
        engine, adapted: an engine's weights without an adapter, and those that an adapter changes.
        gathered: unsharded weights that FSDP2 holds while computing, in the type of the computation.
        apart, layer: the weights outside of layers, and of the largest layer, in that type.
        token, vocabulary: keys and values of a token, and float32 logits of a token.
        learning, predicting: memory of a pass per token, with gradients and without.
        learning_on_accelerator: memory of a pass per token with gradients, on an accelerator.
    """

    weights: int
    trained: int
    sent: int
    pieces: int
    engine: int
    adapted: int
    gathered: int
    apart: int
    layer: int
    token: int
    vocabulary: int
    learning: int
    predicting: int
    learning_on_accelerator: int

    def logits(self, rows: int) -> int:
        """Return the bytes of the logits of `rows` tokens, which are computed in chunks."""
        return _LOGITS * min(rows * self.vocabulary, max(4 * CHUNK_NUMBERS, self.vocabulary))


def model_sizes(
    actor: LanguageActorConfig, section: LanguageModelConfig | None = None, fsdp: FsdpConfig | None = None
) -> LanguageModelSizes:
    """Return the sizes of a model, by default the actor's, from config.json alone.

    Raises:
        ConfigError: the folder of the model does not exist, or has no configuration.
    """
    section, fsdp = section or actor.model, fsdp or actor.fsdp_config
    lora, width = section.adapter(), DTYPES[section.precision].itemsize
    with torch.device("meta"):
        plain = _plain(section, actor)
        text = plain.config.get_text_config()
        engine = parameter_bytes(plain.parameters(), width=width)
        # A model without adapters is trained in float32.
        plain = plain.to(torch.float32 if lora is None else DTYPES[section.precision])
        model: Any = plain if lora is None else with_lora(plain, lora)
    outputs, inputs, weights = Counter[str](), Counter[str](), Counter[str]()
    for _, block, layer in computing_layers(model):
        if block is not None:
            inputs.setdefault(block, layer.weight.shape[1])
            outputs[block] += layer.weight.shape[0]
    routed = getattr(text, "num_experts_per_tok", None) or 1
    for block, parameter in block_parameters(model):
        weights[block] += parameter.numel()
        # A tensor of all experts' matrices, of which a token uses some; the longer side bounds the output.
        outputs[block] += routed * max(parameter.shape[1:]) if parameter.ndim == _EXPERTS_NDIM else 0
    at_once = sorted(weights.values())[-_LAYERS:] if fsdp.sharding_strategy == "full_shard" else weights.values()
    sent = [weight for name, weight in model.named_parameters() if lora is None or ".lora_" in name]
    size, largest = parameter_bytes(sent, width=width), width * max(weight.numel() for weight in sent)
    changed = (layer.base_layer.weight for layer in model.modules() if hasattr(layer, "lora_A"))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    numbers = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    held = partial(held_in_blocks, outputs, inputs, checkpointing=fsdp.gradient_checkpointing)
    return LanguageModelSizes(
        weights=parameter_bytes(model.parameters()),
        trained=parameter_bytes(weight for weight in model.parameters() if weight.requires_grad),
        sent=size,
        pieces=min(size, _PIECES * max(PIECE_BYTES, largest)),
        engine=engine,
        adapted=parameter_bytes(changed, width=width),
        gathered=engine - width * (weights.total() - sum(at_once)),
        apart=engine - width * weights.total(),
        layer=width * max(weights.values(), default=0),
        token=2 * text.num_hidden_layers * heads * numbers * width,
        vocabulary=4 * plain.get_input_embeddings().weight.shape[0],
        learning=int(width * held()),
        predicting=width * FORWARD * max(outputs.values(), default=0),
        learning_on_accelerator=int(width * held(per_output=BLOCK_ON_ACCELERATOR)),
    )


def _plain(section: LanguageModelConfig, actor: LanguageActorConfig) -> Any:
    """Return the model that a section names, without adapters."""
    if section.model_path is None:
        return built_model(make_tokenizer(actor), hidden_dim=section.hidden_dim, layers=section.num_layers)
    require_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        check_folder(section.model_path)
        config = config_of(AutoConfig, section.model_path)
        model = cast("Any", AutoModelForCausalLM).from_config(config, trust_remote_code=False)
        settle_ties(model, section.model_path)
        return model
    except (ConfigError, ValueError) as error:
        why, help = first_line(error), "its config.json, of a causal language model, is enough: copy it there"
        raise ConfigError("the sizes of the model are not known", why=why, help=help) from None
