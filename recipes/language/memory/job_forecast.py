"""A forecast of the memory of a language model's job, of its file and the configuration of its model alone.

Weights and activations are those of the model on torch's meta device, which has shapes and no memory; the answers of a
step are as long as they may be. What a process holds besides is measured when the forecast is made, by `memory_base`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.config import LanguageConfig
from recipes.language.config.engine_facts import BACKENDS
from recipes.language.loop.worker_groups import optional_components
from recipes.language.memory.engine_memory import engine_memory
from recipes.language.memory.longest_answers import BATCH_COPIES, PromptReader, StepAnswers, first_prompts, step_answers
from recipes.language.memory.model_memory import ModelMemory, PassMemory, micro_batches
from recipes.language.models.load_model import make_tokenizer
from recipes.language.weights.weight_transfer import PIECE_BYTES
from recipes.sections.actor import FsdpConfig
from recipes.training.memory.empty_process import measure_empty_process
from rlinf_core import ConfigError
from rlinf_core.job.process_forecast import PhaseForecast, ProcessForecast
from rlinf_core.registry import import_target
from rlinf_core.runners.runner import NEVER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from recipes.language.answers.sequences import Sequence as Answer

# Pieces of weights that are there at a time besides what is kept: one that is sent, one that is loaded, and the memory
# of the one that it took the place of.
_PIECES: Final = 3
# Layers whose shards are gathered at a time: one that computes, and the next.
_LAYERS: Final = 2
# Fewest tokens of a pass that are proposed, and how often a number is halved: each change is forecast anew.
_FEWEST: Final = 64
_MOST_HALVES: Final = 5
_DEVICE: Final = frozenset(
    (
        *("weights", "gradients", "optimizer", "activations", "kept", "merged adapter", "keys and values"),
        *("copied weights", "gathered weights", "gathered gradients"),
    )
)


class Workers(NamedTuple):
    """The modules of the workers that differ between recipes, and the method by which their engines work.

    Attributes:
        rollout: module of the rollout workers.
        kind: of their empty process, see `memory_base`.
        generates: their method.
    """

    rollout: str = "recipes.language.workers.rollout_worker"
    kind: str = "rollout"
    generates: str = "generate"


class Sizes(NamedTuple):
    """The parts of a forecast that processes share.

    Attributes:
        config: the whole file.
        tokenizer: None where there is none here.
        counts: processes of each component.
        model: that the actors train.
        answers: of a training step.
    """

    config: LanguageConfig
    tokenizer: PreTrainedTokenizerBase | None
    counts: Mapping[str, int]
    model: ModelMemory
    answers: StepAnswers

    def count(self, component: str) -> int:
        """Return how many processes a component has."""
        return self.counts.get(component, 1)


def forecast(config: LanguageConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, by component and phase.

    Args:
        config: the whole file.
        world_sizes: processes of each component; None where that is not known: 1.

    Raises:
        ConfigError: the sizes of the model are not known.
    """
    return component_forecasts(sizes_of(config, world_sizes, first_prompts), Workers())


def sizes_of(config: LanguageConfig, world_sizes: Mapping[str, int | None], read: PromptReader) -> Sizes:
    """Return the parts of a forecast that processes share; `read` returns the prompts of training.

    Raises:
        ConfigError: the sizes of the model are not known.
    """
    try:
        tokenizer = make_tokenizer(config.actor)
    except ConfigError:
        tokenizer = None
    checkpointing = config.actor.fsdp_config.gradient_checkpointing
    model = ModelMemory(config.actor, tokenizer, checkpointing=checkpointing)
    answers = step_answers(config, tokenizer, read)
    return Sizes(config, tokenizer, {name: count or 1 for name, count in world_sizes.items()}, model, answers)


def component_forecasts(sizes: Sizes, workers: Workers) -> list[ProcessForecast]:
    """Return the forecasts of the components that every recipe of language models has, and of those that it may."""
    optional = optional_components(sizes.config)
    return [
        _actor(sizes),
        _rollout(sizes, workers),
        _reward(sizes),
        *([_critic(sizes)] if "critic" in optional else []),
        *([_reference(sizes)] if "reference" in optional else []),
    ]


def savings(config: LanguageConfig) -> list[tuple[str, ...]]:
    """Return changes that save memory, the nearest first: fewer tokens in a pass, fewer that run at once, both, and
    fewer samples.
    """
    learners = ["actor", *optional_components(config)]
    most = config.actor.max_tokens_per_micro_batch
    passes = [
        tuple(f"{name}.max_tokens_per_micro_batch={size}" for name in learners) for size in _halves(most, _FEWEST)
    ]
    longest, batch = config.runner.seq_length, config.data.rollout_batch_size
    held = config.rollout.max_running_tokens or batch * config.algorithm.group_size * longest
    own = BACKENDS[config.rollout.backend].name == "torch"
    running = [(f"rollout.max_running_tokens={size}",) for size in _halves(held, longest)] if own else []
    smallest = (passes[-1:] or [()])[0] + (running[-1:] or [()])[0]
    fewer = [
        (f"data.rollout_batch_size={count}", *smallest)
        for count in _halves(batch, config.minibatches)
        if config.actor.global_batch_size is None
    ]
    return [*passes, *running, *([smallest] if passes and running else []), *fewer]


def _halves(number: int, least: int) -> list[int]:
    """Return a half of a number, a quarter and so on, down to `least`, a few of them."""
    found: list[int] = []
    while number // 2 >= least and len(found) < _MOST_HALVES:
        number //= 2
        found.append(number)
    return found


def _actor(sizes: Sizes) -> ProcessForecast:
    config, model, count = sizes.config, sizes.model, sizes.count("actor")
    actor, base = config.actor, empty_process(config, "actor", "recipes.language.workers.actor_worker")
    learning, evaluating = _passes(sizes, model, count, actor.max_tokens_per_micro_batch, actor.micro_batch_size)
    gathered = _gathers(actor.fsdp_config, count, actor.model.precision)
    resting = _resting(model, actor.fsdp_config, count, base["work"])
    batch = sizes.answers.batch_bytes // count
    sent = _sent(sizes)
    resting |= {"copied weights": sum(model.tensors) if gathered else 0, "sent weights": sent, "answers": batch}
    again = config.algorithm.recompute_logprobs or (config.algorithm.kl_beta > 0 and not sizes.counts.get("reference"))
    kept = max(learning.kept, evaluating.kept if again else 0)
    working = _gathered(model, actor.fsdp_config, repeats=learning.repeats and count > 1)
    phases = (
        _making(sizes, model, base["init"], copied=sum(model.tensors)),
        _phase("sync_model_to_rollout", {**resting, "kept": kept}),
        _phase("recv_rollout_batch", {**resting, "answers": BATCH_COPIES * batch, "kept": kept}),
        _phase(
            "compute_advantages_and_returns",
            {**resting, **({"activations": max(evaluating.peak, kept)} if again else {"kept": kept})},
        ),
        _phase("run_training", {**resting, "activations": learning.peak, **(working if gathered else {})}),
    )
    shared = count * (batch + sent)
    return ProcessForecast("actor", count, phases, shared, (*sizes.answers.notes, *_notes(sizes)))


def _critic(sizes: Sizes) -> ProcessForecast:
    config, count = sizes.config, sizes.count("critic")
    critic, base = config.critic, empty_process(config, "critic", "recipes.language.workers.critic_worker")
    section = critic.model or config.actor.model
    checkpointing = critic.fsdp_config.gradient_checkpointing
    model = ModelMemory(config.actor, sizes.tokenizer, section, values=True, checkpointing=checkpointing)
    learning, evaluating = _passes(sizes, model, count, critic.max_tokens_per_micro_batch, None)
    gathered = _gathers(critic.fsdp_config, count, section.precision)
    resting = _resting(model, critic.fsdp_config, count, base["work"])
    resting["answers"] = sizes.answers.batch_bytes // count
    working = _gathered(model, critic.fsdp_config, repeats=learning.repeats and count > 1)
    phases = (
        _making(sizes, model, base["init"], copied=0),
        _phase("evaluate", {**resting, "activations": max(learning.kept, evaluating.peak)}),
        _phase("run_training", {**resting, "activations": learning.peak, **(working if gathered else {})}),
    )
    return ProcessForecast("critic", count, phases)


def _reference(sizes: Sizes) -> ProcessForecast:
    config, count = sizes.config, sizes.count("reference")
    base = empty_process(config, "reference", "recipes.language.workers.reference_worker")
    section, own = config.actor.model, config.reference.model_path
    if own is not None:
        section = section.model_copy(update={"model_path": own, "lora": None, "is_lora": False})
    model = ModelMemory(config.actor, sizes.tokenizer, section, trains=False)
    _, evaluating = _passes(sizes, model, count, config.reference.max_tokens_per_micro_batch, None)
    shards = count if config.actor.fsdp_config.sharding_strategy != "no_shard" else 1
    parts = {
        "base": base["work"],
        "weights": model.weights // shards,
        "answers": BATCH_COPIES * sizes.answers.batch_bytes // count,
        "activations": evaluating.peak,
    }
    phases = (_making(sizes, model, base["init"], copied=0), _phase("evaluate", parts))
    return ProcessForecast("reference", count, phases)


def _rollout(sizes: Sizes, workers: Workers) -> ProcessForecast:
    config, model, answers, count = sizes.config, sizes.model, sizes.answers, sizes.count("rollout")
    base = empty_process(config, workers.kind, workers.rollout)
    drawn = answers.objects(model.vocabulary) // count
    if BACKENDS[config.rollout.backend].name != "torch":
        parts = {"base": base["init"], "answers": drawn}
        phases = (_phase("init_worker", {"base": base["init"]}), _phase(workers.generates, parts))
        return ProcessForecast("rollout", count, phases, notes=_of_other_engine(sizes))
    rows = -(-answers.number * (1 + config.runner.max_staleness) // count)
    runner, data = config.runner, config.data
    if runner.val_check_interval != NEVER or runner.only_eval:
        rows = max(rows, -(-min(data.val_size, data.val_rollout_batch_size) * data.val_samples // count))
    engine = engine_memory(config, model, answers, rows)
    there = 0 if model.in_file else model.engine
    resting = {
        "base": base["work"],
        "weights": model.engine,
        "merged adapter": model.adapted,
        "received weights": _pieces(model),
    }
    parts = {"keys and values": engine.cache, "activations": engine.activations, "answers": drawn}
    phases = (
        _phase("init_worker", {"base": base["init"], "weights": there}),
        _phase("sync_model_from_actor", {**resting, "kept": engine.kept}),
        _phase(workers.generates, {**resting, **parts}),
    )
    notes: tuple[str, ...] = ()
    if config.actor.model.precision != "fp32":
        notes = ("an engine on the CPU computes in float32: weights, keys and values are twice as large there",)
    return ProcessForecast("rollout", count, phases, count * drawn, notes)


def _reward(sizes: Sizes) -> ProcessForecast:
    config, answers, count = sizes.config, sizes.answers, sizes.count("reward")
    base = empty_process(config, "reward", "recipes.language.workers.reward_worker")["init"]
    parts = {"base": base, "answers": (answers.objects(sizes.model.vocabulary) + answers.batch_bytes) // count}
    notes: tuple[str, ...] = ()
    kind = config.reward.reward_type
    if kind in ("math", "reasoning_gym") or ":" in kind:
        notes = (f"the process in which each reward worker scores by `{kind}` is not counted",)
    return ProcessForecast("reward", count, (_phase("init_worker", {"base": base}), _phase("score", parts)), 0, notes)


def _phase(name: str, parts: Mapping[str, int]) -> PhaseForecast:
    there = {part: size for part, size in parts.items() if size}
    return PhaseForecast(name, there, frozenset(_DEVICE & there.keys()))


def _making(sizes: Sizes, model: ModelMemory, base: int, *, copied: int) -> PhaseForecast:
    """Return the phase in which a model is made: shown right answers, or copied into one buffer that is sent from."""
    config = sizes.config
    shown = _warm_start(sizes) if model.is_built and config.actor.warm_start.steps else 0
    weights = 0 if model.in_file and copied < model.weights else model.weights
    made = {"warm start": shown} if shown > copied else {"copied weights": copied}
    # On the host, whence they go to an accelerator.
    return PhaseForecast("init_worker", {"base": base, "weights": weights, **made})


def _warm_start(sizes: Sizes) -> int:
    """Return what supervised steps take: gradients, an optimizer's state, activations."""
    config, tokenizer, model = sizes.config, sizes.tokenizer, sizes.model
    if tokenizer is None:
        return 0
    start = config.actor.warm_start.model_copy(update={"steps": 1})
    once = config.model_copy(update={"actor": config.actor.model_copy(update={"warm_start": start})})
    make: Any = import_target(config.shown_first, "examples")
    examples: list[Answer] = make(once, tokenizer)
    if not examples:
        return 0
    pieces = [RolloutBatch.of([each], number, [0.0]) for number, each in enumerate(examples)]
    return 3 * model.trained + model.shown(RolloutBatch.joined(pieces))


def _resting(model: ModelMemory, fsdp: FsdpConfig, count: int, base: int) -> dict[str, int]:
    """Return what a worker that trains holds from its first training step on."""
    shards = count if fsdp.sharding_strategy != "no_shard" else 1
    return {
        "base": base,
        "weights": model.weights // shards,
        "gradients": model.trained // shards,
        "optimizer": 2 * model.trained // shards,
    }


def _gathered(model: ModelMemory, fsdp: FsdpConfig, *, repeats: bool) -> dict[str, int]:
    """Return what FSDP2 holds while it computes: whole weights, and the whole gradients that are not summed yet.

    Shards are gathered for a layer while another one computes. Of several passes the last one alone sums gradients over
    ranks: until then each rank has all of them, in float32.
    """
    every = fsdp.sharding_strategy != "full_shard"
    layers = sum(model.layers) if every else sum(sorted(model.layers)[-_LAYERS:])
    return {"gathered weights": model.rest + layers, "gathered gradients": model.trained if repeats else 0}


def _passes(
    sizes: Sizes, model: ModelMemory, count: int, max_tokens: int, max_answers: int | None
) -> tuple[PassMemory, PassMemory]:
    """Return the memory of passes over an optimizer step's answers that learn, and over all answers that evaluate."""
    config, answers = sizes.config, sizes.answers
    share = config.actor.share_prompts
    micro = micro_batches(max_tokens, share_prompts=share, max_answers=max_answers)
    temperature = config.rollout.sampling_params.temperature
    groups = -(-len(answers.prompts) // count)
    every = answers.batch(groups, max_tokens)
    step = answers.batch(-(-groups // config.minibatches), max_tokens)
    learning = model.learning(step, micro, temperature) if model.trained else PassMemory(0, 0)
    return learning, model.evaluating(every, micro, temperature)


def _gathers(fsdp: FsdpConfig, count: int, precision: str) -> bool:
    """Return whether layers compute with weights other than those that are trained: gathered ones, or copies."""
    return precision != "fp32" or (count > 1 and fsdp.sharding_strategy != "no_shard")


def _sent(sizes: Sizes) -> int:
    """Return what an actor holds in shared memory to send its weights."""
    model, config = sizes.model, sizes.config
    receivers = -(-sizes.count("rollout") // sizes.count("actor"))
    section = config.actor.model
    # An engine that alone gets them goes on with the memory that they came in.
    keeps = BACKENDS[config.rollout.backend].name == "torch" and receivers == 1
    keeps = keeps and section.adapter() is None and section.precision == "fp32"
    return sum(model.tensors) + _pieces(model) if keeps else _pieces(model)


def _pieces(model: ModelMemory) -> int:
    """Return the pieces of weights that are on their way at a time."""
    largest = sorted(max(PIECE_BYTES, each) for each in model.tensors)[-_PIECES:]
    return min(sum(model.tensors), sum(largest))


def _of_other_engine(sizes: Sizes) -> tuple[str, ...]:
    """Return what is known of an engine that is not ours."""
    rollout, model = sizes.config.rollout, sizes.model
    if rollout.backend == "server":
        return ("the server that answers is not counted",)
    token = 2 * model.shape.layers * model.shape.heads * model.shape.dim * model.number
    share = f"{rollout.gpu_memory_utilization:.0%} of each of its accelerators (`rollout.gpu_memory_utilization`)"
    return (
        f"{rollout.backend} takes {share}: weights of {model.engine / 2**30:.1f} GiB, and for each token"
        f" {token / 2**10:.0f} KiB of keys and values",
        f"what {rollout.backend} takes of the host's memory is not counted",
    )


def _notes(sizes: Sizes) -> tuple[str, ...]:
    config = sizes.config
    notes: list[str] = []
    if sizes.tokenizer is None:
        notes.append("the tokenizer is not counted: its folder has none on this machine")
    offloaded = [name for name in ("actor", "rollout", "critic", "reference") if getattr(config, name).enable_offload]
    if offloaded:
        names = ", ".join(f"`{name}`" for name in offloaded)
        notes.append(f"{names} counted as if always on the accelerator: `enable_offload` moves them off in turns")
    return tuple(notes)


def empty_process(
    config: LanguageConfig, component: str, module: str, program: str = "recipes.language.memory.base_program"
) -> Mapping[str, int]:
    """Return the bytes of a process of a component before it holds anything of a job, by phase.

    Args:
        config: the whole file.
        component: of the process, as `program` calls it.
        module: of its worker.
        program: is run to measure it; see `memory_base`.
    """
    return _measured(program, component, module, pickle.dumps(_said(config)))


def _said(config: LanguageConfig) -> LanguageConfig:
    """Return a file with what an empty process depends on: what saves memory elsewhere is as if it were not said."""
    plain = type(config.actor).model_fields
    usual = {name: plain[name].get_default() for name in ("max_tokens_per_micro_batch", "micro_batch_size")}
    actor = config.actor.model_copy(update=usual)
    rollout = config.rollout.model_copy(update={"max_running_tokens": 0})
    shows = config.actor.model.model_path is None and config.actor.warm_start.steps
    data = config.data if shows else config.data.model_copy(update={"rollout_batch_size": 1})
    return config.model_copy(update={"actor": actor, "rollout": rollout, "data": data})


@cache
def _measured(program: str, component: str, module: str, given: bytes) -> Mapping[str, int]:
    return measure_empty_process(program, component, module, given=given)
