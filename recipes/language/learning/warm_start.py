"""Initial models, loaded or built with a supervised warm start, with adapters if configured, and their training
state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.answers.sequences import undrawn
from recipes.language.config.described_models import ModelJobConfig
from recipes.language.config.language_config import LanguageActorConfig, LanguageConfig, LanguageModelConfig
from recipes.language.data.problem_sources import load_problems
from recipes.language.data.problems import PromptEncoder, training_order
from recipes.language.models.load_model import check_vocabulary, hollow_causal, make_model
from recipes.language.models.packing import pack
from recipes.language.models.policy import (
    METHODS,
    PLAIN,
    AnswerModel,
    LanguagePolicy,
    StandInLanguagePolicy,
    Zeros,
    check_policy,
    checkpoint_decoder,
)
from recipes.language.text.text_tokens import TextTokens
from recipes.training.huggingface import with_lora
from recipes.training.optimizer import EagerAdamW
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.sharding import is_sharded
from recipes.training.typed_tensors import DTYPES, cast_weights, compute_dtype
from recipes.training.weight_sources import (
    WeightsOfRankZero,
    WeightSource,
    fill_weights,
    stored_weights,
    within,
)
from recipes.training.weights.training_state import TrainingState
from recipes.training.without_memory import forget_weights, without_memory
from rlinf_core import ConfigError
from rlinf_core.process import pacing
from rlinf_core.registry import import_target
from rlinf_core.runners.storage.first_contact import FirstContact

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Examples: TypeAlias = Callable[[LanguageConfig, "PreTrainedTokenizerBase"], Sequence[Answer]]


class InitialPolicy(NamedTuple):
    """The initial model of training.

    Attributes:
        policy: see `initial_policy`.
        weights: the source from which each rank takes its shard, if the parameters of `policy` have no memory; else
            None.
    """

    policy: LanguagePolicy
    weights: WeightSource | None = None


def initial_policy(
    config: ModelJobConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    model: LanguageModelConfig | None = None,
    *,
    trains: bool = True,
    gradient_checkpointing: bool = False,
    shards: bool = False,
    rank: int = 0,
) -> InitialPolicy:
    """Return the initial model, in a rehearsal a stand-in; all processes that build it get equal weights.

    It stays in evaluation mode, without dropout, so that engine and trainer compute the same.

    Args:
        config: the whole configuration.
        tokenizer: the tokenizer of the actor.
        device: the device of the model.
        model: the section of the model; None: `actor.model`.
        trains: whether the model is trained: trained weights are in float32, others in `model.precision`.
        gradient_checkpointing: whether layers recompute their activations in the backward pass.
        shards: whether ranks hold shards and never the whole model. Rank 0 still builds it whole if it is a tiny random
            model, or if transformers makes a weight from several weights of the folder.
        rank: the rank of this process.

    Raises:
        ConfigError: the model cannot be loaded, or does not fit the tokenizer.
    """
    chosen = model or config.actor.model
    actor = config.actor.model_copy(update={"model": chosen})
    if pacing.active is not None:
        policy, source = _stand_in(actor, tokenizer), Zeros()
        if not shards:
            fill_weights(policy, source, device)
        return InitialPolicy(policy, source if shards else None)
    if not shards:
        policy, source = _whole_policy(config, actor, tokenizer, device, trains=trains), None
    else:
        policy, source = _hollow_policy(actor, tokenizer, trains=trains)
        if source is None:
            mine = _whole_policy(config, actor, tokenizer, device, trains=trains).cpu() if rank == 0 else None
            forget_weights(policy)
            source = WeightsOfRankZero(mine)
    if gradient_checkpointing:
        checkpoint_decoder(policy)
    return InitialPolicy(policy, source)


def compare_with_plain(contact: FirstContact, model: AnswerModel) -> None:
    """Compare a model's log-probabilities with transformers, if checks are on. Collective: all ranks call it together.

    Raises:
        ConfigError: the log-probabilities differ from transformers'.
    """
    name = type(model.causal).__name__
    contact.compare(f"log-probabilities of `{name}`", PLAIN, lambda: check_policy(model))


def _whole_policy(
    config: ModelJobConfig,
    actor: LanguageActorConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    *,
    trains: bool,
) -> LanguagePolicy:
    """Return the model with all weights, and a warm start if it is a tiny random model."""
    plain = make_model(actor, tokenizer, _dtype(actor, trains=trains))
    policy = _policy_of(plain, actor, trains=trains).to(device)
    built = actor.model.model_path is None
    if built and isinstance(config, LanguageConfig) and config.actor.warm_start.steps:
        shown = cast("Examples", import_target(config.warm_start_examples, "examples"))(config, tokenizer)
        warm_start(policy, shown, config.data.rollout_batch_size, config.actor.warm_start.lr)
    if not trains:
        cast_weights(policy.requires_grad_(False), DTYPES[actor.model.precision])
    return policy


def _hollow_policy(
    actor: LanguageActorConfig, tokenizer: PreTrainedTokenizerBase, *, trains: bool
) -> tuple[LanguagePolicy, WeightSource | None]:
    """Return the model without memory, except adapters, and the source of its weights in its folder."""
    folder, dtype = actor.model.model_path, _dtype(actor, trains=trains)
    stored = None
    if folder is None:
        with without_memory():
            plain = make_model(actor, tokenizer, dtype)
    else:
        plain = hollow_causal(folder, dtype)
        check_vocabulary(plain, tokenizer)
        stored = stored_weights(plain, folder)
    policy = _policy_of(plain, actor, trains=trains)
    if not trains:
        cast_weights(policy.requires_grad_(False), DTYPES[actor.model.precision])
    return policy, None if stored is None else within(policy, stored)


def _stand_in(actor: LanguageActorConfig, tokenizer: PreTrainedTokenizerBase) -> StandInLanguagePolicy:
    """Return the stand-in of a rehearsal, whose weights have no memory and are not read."""
    model, dtype = actor.model, _dtype(actor, trains=True)
    if model.model_path is not None:
        plain = hollow_causal(model.model_path, dtype)
    else:
        with without_memory():
            plain = make_model(actor, tokenizer, dtype)
    lora = model.adapter()
    policy = StandInLanguagePolicy(plain if lora is None else cast("PreTrainedModel", with_lora(plain, lora)))
    return policy.eval()


def _policy_of(plain: PreTrainedModel, actor: LanguageActorConfig, *, trains: bool) -> LanguagePolicy:
    """Return a model as a policy, with adapters if configured, initialized by a seed."""
    torch.manual_seed(derive_seed(actor.seed, Purpose.WEIGHTS))
    lora = actor.model.adapter()
    return LanguagePolicy(plain if lora is None else cast("PreTrainedModel", with_lora(plain, lora))).eval()


def _dtype(actor: LanguageActorConfig, *, trains: bool) -> torch.dtype:
    """Return the type that a model is loaded in.

    A tiny random model has its warm start in float32 everywhere, so that reference and policy start equal.
    """
    whole = actor.model.adapter() is None and (trains or actor.model.model_path is None)
    return torch.float32 if whole else DTYPES[actor.model.precision]


def right_answers(config: LanguageConfig, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """Return `actor.warm_start.steps` batches of training problems with their right answers.

    Raises:
        ConfigError: every prompt is empty or too long.
    """
    data = config.data
    problems = load_problems(data, evaluation=False)
    encoder = PromptEncoder(tokenizer, few_shot=data.few_shot, max_prompt_length=data.max_prompt_length)
    count = config.actor.warm_start.steps * data.rollout_batch_size
    texts, end = TextTokens(tokenizer), cast("Any", tokenizer).eos_token_id
    examples: list[Answer] = []
    # Epochs repeat problems, so each is tokenized once.
    known: dict[int, Answer | None] = {}
    for index in training_order(len(problems), 0, count, seed=config.actor.seed, shuffle=True):
        if index not in known:
            problem = problems[index]
            prompt = encoder.encode(problem)
            answer = texts.behind(problem.answer)
            # Skip a prompt that is too long, as training does, or empty, which predicts nothing.
            known[index] = undrawn(prompt, (*answer, end)) if prompt else None
        shown = known[index]
        if shown is not None:
            examples.append(shown)
    if not examples:
        raise ConfigError(
            f"each of the first {count} prompts is empty or longer than `data.max_prompt_length`"
            f" ({data.max_prompt_length} tokens)",
            help="raise it, and `runner.seq_length` with it",
        )
    return list(islice(cycle(examples), count))


def warm_start(policy: LanguagePolicy, examples: Sequence[Answer], batch_size: int, lr: float) -> None:
    """Take one optimizer step (AdamW, betas 0.9 and 0.95) on every `batch_size` examples."""
    optimizer = EagerAdamW(
        [parameter for parameter in policy.parameters() if parameter.requires_grad],
        lr=lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    device = next(policy.parameters()).device
    for start in range(0, len(examples) - batch_size + 1, batch_size):
        shown = examples[start : start + batch_size]
        batch = RolloutBatch.of(shown, 0, [0.0] * len(shown))
        masks = policy.takes_masks(int(batch.lengths.max()))
        logprobs = policy(pack(batch, masks=masks, device=device)).logprobs
        loss = -logprobs[batch.trained.to(device)].mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    # Clear gradients: a checkpoint can be loaded into another optimizer only while no weight has one.
    optimizer.zero_grad()


def begin_training(
    config: ModelJobConfig,
    tokenizer: PreTrainedTokenizerBase,
    contact: FirstContact,
    *,
    device: torch.device,
    rank: int,
    world_size: int,
    is_sent: Callable[[str], bool],
) -> tuple[LanguagePolicy, TrainingState]:
    """Load or build the model of `actor`, and create its optimizer. Collective: all ranks call it, and start equal.

    Args:
        config: the configuration of the job.
        tokenizer: the tokenizer, whose tokens must be in the model's vocabulary.
        contact: the start-up checks to which comparisons are added.
        device, rank, world_size: the device, rank and world size of this worker.
        is_sent: returns whether a weight, by its name, goes to other groups.

    Raises:
        ConfigError: the model cannot be loaded, does not fit the tokenizer, or differs from transformers' computation.
    """
    actor = config.actor
    computes = compute_dtype(actor.model.precision)
    policy, weights = initial_policy(
        config,
        tokenizer,
        device,
        gradient_checkpointing=actor.fsdp_config.gradient_checkpointing,
        shards=is_sharded(actor.fsdp_config, world_size, computes),
        rank=rank,
    )
    contact.compare(
        "tokens of the tokenizer",
        "the model's vocabulary",
        lambda: check_vocabulary(policy.causal, tokenizer),
        cheap=True,
    )
    state = TrainingState(
        policy,
        actor.optim,
        actor.fsdp_config,
        rank=rank,
        world_size=world_size,
        device=device,
        blocks=policy.blocks,
        methods=METHODS,
        is_sent=is_sent,
        compute_dtype=computes,
        initial=weights,
    )
    compare_with_plain(contact, policy)
    return policy, state
