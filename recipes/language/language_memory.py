"""The forecast of the memory of a language model's job, by arithmetic on its file and on config.json of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch

from recipes.language.config import (
    LanguageActorConfig,
    LanguageConfig,
    LanguageModelConfig,
    LanguageReferenceConfig,
    LanguageTeacherConfig,
)
from recipes.language.config.engine_facts import BACKENDS
from recipes.language.config.frozen_models import judge_job, reference_model, teacher_model
from recipes.language.loop.worker_groups import optional_components
from recipes.language.models.load_model import built_model, make_tokenizer
from recipes.language.models.policy import CHUNK_NUMBERS
from recipes.sections.actor import FsdpConfig, OptimConfig
from recipes.training.dtypes import DTYPES
from recipes.training.huggingface import check_folder, config_of, first_line, require_transformers, with_lora
from recipes.training.memory.layer_sizes import (
    FORWARD,
    block_parameters,
    computing_layers,
    held_in_blocks,
    parameter_bytes,
)
from recipes.training.memory.process_parts import TORCH, TRAINING, TRANSFORMERS, WORKER, shard_parts
from recipes.training.weights.sent_weights import PIECE_BYTES
from rlinf_core import ConfigError
from rlinf_core.job.process_forecast import ProcessForecast
from rlinf_core.runners.runner import NEVER

# Bytes of a token of a batch that is learned from: itself, whether it is trained, log-probability, version, reward,
# advantage, and the log-probability that ratios are taken against. A batch is there twice while it is handed on.
_BATCH_TOKEN: Final = 2 * (8 + 1 + 4 + 8 + 4 + 4 + 4)
# Bytes of a token that has been drawn, as Python's objects; and of the numbers of a row of the engine.
_DRAWN_TOKEN: Final = 3 * 8 + 24 + 28
_ROW_TOKEN: Final = 8 + 4 + 8
# Tensors of the size of the logits, float32, while they are learned or drawn from.
_LOGITS: Final = 5
# Unlike prompt tokens that the engine computes in one pass.
_PREFILL_TOKENS: Final = 8192
# Pieces of weights that are on their way at a time; layers whose shards are gathered at a time.
_PIECES: Final = 3
_LAYERS: Final = 2
# Dimensions of a tensor that holds the matrices of all experts: expert, and the two of a matrix.
_EXPERTS_NDIM: Final = 3
# Bytes in memory for each byte of a file of problems.
_READ: Final = 4
_ON_CPU: Final = "an engine on the CPU computes in float32: weights, keys and values are twice as large there"
_BASE: Final = WORKER + TORCH + TRANSFORMERS


class LanguageModelSizes(NamedTuple):
    """Sizes of a language model, in bytes.

    Attributes:
        weights, trained: all weights as they are kept, and those that are trained.
        sent, pieces: what an engine is sent, in the type that it travels in, and how much of it at a time.
        engine, adapted: what an engine holds without an adapter, and what of that an adapter changes.
        gathered: whole weights that FSDP2 holds while it computes, in the type of the computation.
        apart, layer: of the weights that are in no layer, and of the largest layer, in that type.
        token, vocabulary: keys and values of a token, and float32 logits of one.
        learning, predicting: what a pass holds for a token, with gradients and without.
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

    def logits(self, rows: int) -> int:
        """Return what logits of so many tokens take, which are computed by the chunk."""
        return _LOGITS * min(rows * self.vocabulary, max(4 * CHUNK_NUMBERS, self.vocabulary))


def model_sizes(
    actor: LanguageActorConfig, section: LanguageModelConfig | None = None, fsdp: FsdpConfig | None = None
) -> LanguageModelSizes:
    """Return the sizes of a model, by default of the actor's. Of its folder config.json alone is read.

    Raises:
        ConfigError: the folder of the model is not there, or has no configuration.
    """
    section, fsdp = section or actor.model, fsdp or actor.fsdp_config
    lora, width = section.adapter(), DTYPES[section.precision].itemsize
    with torch.device("meta"):
        plain = _plain(section, actor)
        text = plain.config.get_text_config()
        engine = parameter_bytes(plain.parameters(), width=width)
        # Without adapters it is trained in float32.
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
        # A matrix of each expert in one tensor, of which a token takes some; whichever side puts out, it is no longer.
        outputs[block] += routed * max(parameter.shape[1:]) if parameter.ndim == _EXPERTS_NDIM else 0
    at_once = sorted(weights.values())[-_LAYERS:] if fsdp.sharding_strategy == "full_shard" else weights.values()
    sent = [weight for name, weight in model.named_parameters() if lora is None or ".lora_" in name]
    size, largest = parameter_bytes(sent, width=width), width * max(weight.numel() for weight in sent)
    changed = (layer.base_layer.weight for layer in model.modules() if hasattr(layer, "lora_A"))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    numbers = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
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
        learning=int(width * held_in_blocks(outputs, inputs, checkpointing=fsdp.gradient_checkpointing)),
        predicting=width * FORWARD * max(outputs.values(), default=0),
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
        return cast("Any", AutoModelForCausalLM).from_config(config, trust_remote_code=False)
    except (ConfigError, ValueError) as error:
        why, help = first_line(error), "its config.json, of a causal language model, is enough: copy it there"
        raise ConfigError("the sizes of the model are not known", why=why, help=help) from None


class Sizes(NamedTuple):
    """The parts of a forecast that processes share.

    Attributes:
        config: the whole file.
        counts: processes of each component.
        model: that the actors train.
        prompt, drawn, longest: most tokens of a prompt, of an answer, and of both together.
    """

    config: LanguageConfig
    counts: Mapping[str, int]
    model: LanguageModelSizes
    prompt: int
    drawn: int
    longest: int

    @classmethod
    def of(cls, config: LanguageConfig, world_sizes: Mapping[str, int | None]) -> Sizes:
        """Return the parts for a file; raises as `model_sizes` does."""
        room = config.runner.seq_length
        prompt, drawn = min(config.data.max_prompt_length, room - 1), min(config.longest_answer, room - 1)
        counts = {name: count or 1 for name, count in world_sizes.items()}
        return cls(config, counts, model_sizes(config.actor), prompt, drawn, min(room, prompt + drawn))

    @property
    def answers(self) -> int:
        """Answers of a training step."""
        return self.config.data.rollout_batch_size * self.config.algorithm.group_size

    def count(self, component: str) -> int:
        """Return how many processes a component has."""
        return self.counts.get(component, 1)

    def batch(self, component: str) -> int:
        """Return the bytes of a process's share of a step's answers, as they are learned from."""
        return -(-self.answers // self.count(component)) * self.longest * _BATCH_TOKEN

    def objects(self, component: str) -> int:
        """Return the bytes of a process's share of a step's answers, as they were drawn."""
        return -(-self.answers // self.count(component)) * self.drawn * _DRAWN_TOKEN

    def micro(self, component: str, most: int, minibatches: int = 1) -> tuple[int, bool]:
        """Return the tokens of the fullest pass over a share of the answers, and whether there are several passes."""
        actor, group = self.config.actor, self.config.algorithm.group_size
        apart = group * self.longest
        packed = min(apart, self.prompt + group * self.drawn) if actor.share_prompts else apart
        every = -(-self.config.data.rollout_batch_size // (self.count(component) * minibatches)) * packed
        most = min(most, (actor.micro_batch_size or self.answers) * self.longest)
        return min(every, max(most, self.longest)), every > most

    def process(
        self, component: str, parts: Mapping[str, int], *notes: str, shared: int = 0, offloads: bool = False
    ) -> ProcessForecast:
        """Return the forecast of a component, without parts that are empty."""
        there = {part: size for part, size in parts.items() if size}
        return ProcessForecast(component, self.count(component), there, shared, offloads, notes)


def forecast(config: LanguageConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, see `Recipe.memory`; raises as `model_sizes` does."""
    return component_forecasts(Sizes.of(config, world_sizes))


def component_forecasts(sizes: Sizes) -> list[ProcessForecast]:
    """Return the forecasts of the components that every recipe of language models has, and of those that it may."""
    makers = {"critic": _critic, "reference": _reference, "teacher": _teacher, "judge": _judge}
    return [
        _actor(sizes),
        _rollout(sizes),
        _reward(sizes),
        *(makers[name](sizes) for name in optional_components(sizes.config)),
    ]


def _actor(sizes: Sizes) -> ProcessForecast:
    model, actor, count = sizes.model, sizes.config.actor, sizes.count("actor")
    # An engine that alone gets them goes on with the memory that they came in.
    keeps = BACKENDS[sizes.config.rollout.backend].name == "torch" and sizes.count("rollout") <= count
    keeps = keeps and actor.model.adapter() is None and actor.model.precision == "fp32"
    sent = model.pieces + (model.sent if keeps else 0)
    parts = _learning(
        sizes,
        "actor",
        model,
        actor.model.precision,
        (actor.fsdp_config, actor.optim),
        actor.max_tokens_per_micro_batch,
    )
    parts["sent weights"] = sent
    return sizes.process("actor", parts, shared=count * (sizes.batch("actor") + sent), offloads=actor.enable_offload)


def _critic(sizes: Sizes) -> ProcessForecast:
    critic, section = sizes.config.critic, sizes.config.critic.model or sizes.config.actor.model
    model = model_sizes(sizes.config.actor, section, critic.fsdp_config)
    sharing = critic.fsdp_config, critic.optim
    parts = _learning(sizes, "critic", model, section.precision, sharing, critic.max_tokens_per_micro_batch)
    return sizes.process("critic", parts, offloads=critic.enable_offload)


def _learning(
    sizes: Sizes,
    component: str,
    model: LanguageModelSizes,
    precision: str,
    sharing: tuple[FsdpConfig, OptimConfig],
    most: int,
) -> dict[str, int]:
    """Return what a worker that trains holds: its shard, the answers, and what FSDP2 gathers while it computes.

    Shards are gathered for a layer while another one computes. Without `reduce_each_micro_batch` the last of several
    passes alone sums gradients over ranks: until then each rank has all of them, in float32.
    """
    count, (fsdp, optim) = sizes.count(component), sharing
    tokens, several = sizes.micro(component, most, sizes.config.minibatches)
    parts = {
        "base": _BASE + TRAINING,
        **shard_parts(model.weights, model.trained, fsdp, count, half_state=optim.state_dtype == "bf16"),
        "answers": sizes.batch(component),
        "activations": tokens * model.learning + (model.logits(tokens) if component == "actor" else 0),
    }
    return parts | gathered_parts(model, precision, fsdp, count, parts["activations"], several=several)


def gathered_parts(
    model: LanguageModelSizes, precision: str, fsdp: FsdpConfig, count: int, activations: int, *, several: bool = True
) -> dict[str, int]:
    """Return what one of `count` workers that train holds whole while it computes; nothing without shards.

    Gradients are summed over ranks in float32, layer by layer. Those of what is in no layer, such as the matrix of
    logits, wait until the pass ends, and are summed when its activations are gone.

    Args:
        model: sizes of the model.
        precision: of the computation.
        fsdp: how weights are spread.
        count: of workers.
        activations: of a pass.
        several: whether an optimizer step has several passes.
    """
    if precision == "fp32" and (count == 1 or fsdp.sharding_strategy == "no_shard"):
        return {}
    width = DTYPES[precision].itemsize
    within = model.apart + model.layer * (width + 4) // width
    at_the_end = model.apart * (width + 4) // width - activations
    summed_once = several and count > 1 and not fsdp.reduce_each_micro_batch
    gradients = model.trained if summed_once else min(model.trained, max(within, at_the_end))
    return {"gathered weights": model.gathered, "gathered gradients": gradients}


def _reference(sizes: Sizes) -> ProcessForecast:
    config = sizes.config
    return _frozen(sizes, "reference", reference_model(config), config.reference, config.actor.warm_start.steps)


def _teacher(sizes: Sizes) -> ProcessForecast:
    config = sizes.config
    return _frozen(sizes, "teacher", teacher_model(config), config.teacher, config.teacher.warm_start.steps)


def _frozen(
    sizes: Sizes,
    component: str,
    section: LanguageModelConfig,
    settings: LanguageReferenceConfig | LanguageTeacherConfig,
    warm_start_steps: int,
) -> ProcessForecast:
    """Return the forecast of a worker that holds a model which does not learn."""
    actor = sizes.config.actor
    model = model_sizes(actor, section)
    tokens, _ = sizes.micro(component, settings.max_tokens_per_micro_batch)
    shards = sizes.count(component) if actor.fsdp_config.sharding_strategy != "no_shard" else 1
    parts = {
        "base": _BASE,
        "warm start": 3 * model.weights if section.model_path is None and warm_start_steps else 0,
        "weights": model.engine // shards,
        "answers": sizes.batch(component),
        "activations": tokens * model.predicting + model.logits(tokens),
    }
    return sizes.process(component, parts, offloads=settings.enable_offload)


def _judge(sizes: Sizes) -> ProcessForecast:
    """Return the forecast of a worker that judges: of the engine `torch`, as many tokens as may run at once."""
    config, job = sizes.config, judge_job(sizes.config)
    judge, model = config.judge, model_sizes(job.actor)
    parts = {"base": _BASE}
    if BACKENDS[judge.backend].name != "torch":
        return sizes.process("judge", parts, *_notes_of_engine(job, model))
    every = -(-sizes.answers // sizes.count("judge")) * judge.seq_length
    tokens = max(judge.seq_length, min(every, judge.max_running_tokens or every))
    rows = max(1, tokens // judge.seq_length)
    parts |= {
        "weights": model.engine,
        "keys and values": tokens * model.token + rows * judge.max_new_tokens * _ROW_TOKEN,
        "activations": min(_PREFILL_TOKENS, tokens) * model.predicting + model.logits(rows),
    }
    notes = (_ON_CPU,) if judge.precision != "fp32" else ()
    return sizes.process("judge", parts, *notes)


def _rollout(sizes: Sizes) -> ProcessForecast:
    """Return the forecast of one rollout worker: of the engine `torch`, keys and values of all answers at once."""
    config, model, count = sizes.config, sizes.model, sizes.count("rollout")
    data, runner, rollout, longest = config.data, config.runner, config.rollout, sizes.longest
    files = (Path(name) for name in (*data.train_files, *data.val_data_paths))
    read = _READ * sum(file.stat().st_size for file in files if file.is_file())
    parts = {"base": _BASE, "problems": read, "answers": sizes.objects("rollout")}
    if BACKENDS[rollout.backend].name != "torch":
        return sizes.process("rollout", parts, *_notes_of_engine(config, model))
    rows = -(-sizes.answers * (1 + runner.max_staleness) // count)
    if runner.val_check_interval != NEVER or runner.only_eval:
        rows = max(rows, -(-min(data.val_size, data.val_rollout_batch_size) * data.val_samples // count))
    if rollout.max_running_tokens:
        rows = max(1, min(rows, rollout.max_running_tokens // longest))
    prompts = rows * sizes.prompt // config.algorithm.group_size
    parts |= {
        "weights": model.engine,
        "merged adapter": model.adapted,
        "received weights": model.pieces,
        "keys and values": rows * (longest * model.token + sizes.drawn * _ROW_TOKEN),
        "activations": min(_PREFILL_TOKENS, prompts) * model.predicting + model.logits(rows),
    }
    notes = (_ON_CPU,) if config.actor.model.precision != "fp32" else ()
    shared = count * sizes.objects("rollout")
    return sizes.process("rollout", parts, *notes, shared=shared, offloads=rollout.enable_offload)


def _notes_of_engine(config: LanguageConfig, model: LanguageModelSizes) -> tuple[str, ...]:
    """Return what is known of an engine that is not ours."""
    rollout = config.rollout
    if rollout.backend == "server":
        return ("the server that answers is not counted",)
    share = f"{rollout.gpu_memory_utilization:.0%} of each of its accelerators (`rollout.gpu_memory_utilization`)"
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
