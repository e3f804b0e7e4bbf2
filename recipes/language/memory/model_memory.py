"""Memory of a language model, found on torch's meta device: its weights, and what it takes to learn and to evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.config import LanguageActorConfig, LanguageModelConfig
from recipes.language.engines.own.kv_cache import CacheShape
from recipes.language.engines.own.torch_engine import cache_shape
from recipes.language.learning.micro_batches import MicroBatches
from recipes.language.models.load_model import built_model
from recipes.language.models.packing import PackedRow, pack
from recipes.language.models.policy import AnswerEval, AnswerModel, LanguagePolicy, ValueModel, checkpoint_decoder
from recipes.training.dtypes import DTYPES, cast_weights
from recipes.training.huggingface import check_folder, config_of, require_transformers, with_lora
from recipes.training.memory.host_memory import LARGEST_KEPT
from recipes.training.memory.live_memory import LiveMemory
from recipes.training.sharding import SingleProcess
from rlinf_core import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

META = torch.device("meta")


class PassMemory(NamedTuple):
    """Memory of forward or backward passes, in bytes, besides weights and gradients.

    Attributes:
        peak: the most that there is at a time.
        kept: the same of blocks that the host's allocator keeps when they are freed.
        repeats: whether there is more than one pass in an optimizer step.
    """

    peak: int
    kept: int
    repeats: bool = False


class ModelMemory:
    """Sizes of a language model, in bytes; the model itself has no memory.

    Args:
        actor: the section `actor`.
        tokenizer: decides the vocabulary of a model that is built on the spot.
        section: of the model, where it is another one than `actor.model`.
        trains: whether the weights are to be trained.
        values: whether it is a model of values.
        checkpointing: whether layers compute their activations again in the backward pass.

    Attributes:
        weights: all of them, as they are kept.
        trained: those that are trained.
        tensors: each of those that an engine is sent, in the type that they travel in.
        engine: all that an engine holds, in that type, without an adapter.
        adapted: those of them that an adapter changes; 0 without one.
        is_built: whether it is built on the spot.
        in_file: whether weights that were loaded stay in their file until they are used, which lies in memory then.
        number: bytes of a number that an engine computes with.
        shape: keys and values of its tokens.
        layers: sizes of its parts whose shards are gathered one at a time, in the type that layers compute in.
        rest: of its other weights, which are gathered as one.
        vocabulary: tokens that it knows.

    Raises:
        ConfigError: the folder of the model is not there, or has no configuration.
    """

    def __init__(
        self,
        actor: LanguageActorConfig,
        tokenizer: PreTrainedTokenizerBase | None,
        section: LanguageModelConfig | None = None,
        *,
        trains: bool = True,
        values: bool = False,
        checkpointing: bool = False,
    ) -> None:
        chosen = section or actor.model
        lora, dtype = chosen.adapter(), DTYPES[chosen.precision]
        # As `initial_policy` has them.
        loaded = torch.float32 if lora is None and trains else dtype
        with META:
            plain = _plain(chosen, tokenizer, actor)
            written = getattr(plain.config, "dtype", None)
            plain = cast("PreTrainedModel", cast("Any", plain).to(loaded))
            model = plain if lora is None else cast("PreTrainedModel", with_lora(plain, lora))
            policy: AnswerModel = ValueModel(model) if values else LanguagePolicy(model)
            self.shape: CacheShape = cache_shape(plain)
        self.is_built = chosen.model_path is None
        self.in_file = chosen.model_path is not None and written == loaded
        policy.eval()
        if not trains:
            policy.requires_grad_(False)
        if checkpointing:
            checkpoint_decoder(policy)
        self._policy = policy
        self.number = dtype.itemsize
        own: dict[str, Tensor] = policy.state_dict(keep_vars=True)
        unlike = {id(each): (name, each) for name, each in reversed(own.items())}.values()
        self.weights = _bytes(each for _, each in unlike)
        self.trained = _bytes(each for each in policy.parameters() if each.requires_grad)
        self._largest_trained = max((each.numel() for each in policy.parameters() if each.requires_grad), default=0)
        self.tensors = [each.numel() * dtype.itemsize for name, each in unlike if lora is None or ".lora_" in name]
        adapted = [name.replace("lora_A.default", "base_layer") for name in own if "lora_A.default" in name]
        self.adapted = dtype.itemsize * sum(own[name].numel() for name in adapted)
        self.engine = dtype.itemsize * sum(each.numel() for name, each in unlike if ".lora_" not in name)
        self.layers = [dtype.itemsize * sum(map(Tensor.numel, each.parameters())) for each in policy.blocks]
        self.rest = dtype.itemsize * sum(map(Tensor.numel, policy.parameters())) - sum(self.layers)
        if trains and dtype != torch.float32:
            # Layers compute with copies of the weights.
            cast_weights(plain, dtype)
        self.vocabulary = int(cast("Any", plain.get_input_embeddings()).weight.shape[0])

    def learning(self, batch: RolloutBatch, micro: MicroBatches, temperature: float) -> PassMemory:
        """Return what the largest pass over answers takes, forward and backward."""
        parts = micro.divide(batch, list(range(len(batch))))
        found = self._learned(_fullest(batch, micro, parts), temperature, repeats=len(parts) > 1)
        return found._replace(peak=max(found.peak, self._checked()))

    def _learned(self, row: PackedRow, temperature: float, *, repeats: bool) -> PassMemory:
        policy = self._policy
        policy.zero_grad()
        with LiveMemory() as live, LiveMemory(LARGEST_KEPT) as kept:
            for _ in range(1 + repeats):
                # From the second pass on all gradients are there meanwhile.
                _loss(policy, row, temperature).backward()
            found = PassMemory(live.peak - live.now, kept.peak - kept.now, repeats)
        policy.zero_grad()
        return found

    def _checked(self) -> int:
        """Return what it takes to look at the largest trained weight for NaN and infinities."""
        weight = torch.empty(self._largest_trained, device=META)
        with LiveMemory() as live:
            weight.isfinite()
        return live.peak

    def evaluating(self, batch: RolloutBatch, micro: MicroBatches, temperature: float) -> PassMemory:
        """Return what the largest pass over answers takes without gradients."""
        row = _fullest(batch, micro, micro.divide(batch, list(range(len(batch)))))
        with LiveMemory() as live, LiveMemory(LARGEST_KEPT) as kept, torch.no_grad():
            _forward(self._policy, row, temperature, entropy=False)
        return PassMemory(live.peak, kept.peak)

    def shown(self, batch: RolloutBatch) -> int:
        """Return what a step of the warm start takes, which learns from a batch in one pass."""
        return self._learned(pack(batch, device=META), 1.0, repeats=False).peak

    def computing(self, **given: Any) -> int:
        """Return what a forward pass of the engine takes, besides what it returns; `given` is the model's input."""
        with LiveMemory() as live, torch.no_grad():
            self._policy.causal(**given)
        return live.peak


def micro_batches(max_tokens: int, *, share_prompts: bool, max_answers: int | None = None) -> MicroBatches:
    """Return how answers are divided into passes, on the meta device."""
    alone = SingleProcess(torch.nn.Identity())
    return MicroBatches(alone, META, max_tokens=max_tokens, share_prompts=share_prompts, max_answers=max_answers)


def _plain(
    section: LanguageModelConfig, tokenizer: PreTrainedTokenizerBase | None, actor: LanguageActorConfig
) -> PreTrainedModel:
    if section.model_path is None:
        if tokenizer is None:
            raise ValueError("a model that is built on the spot has the vocabulary of a tokenizer")
        return built_model(tokenizer, hidden_dim=section.hidden_dim, layers=section.num_layers, seed=actor.seed)
    require_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        check_folder(section.model_path)
    except ConfigError as error:
        help = "its config.json is enough, and its tokenizer where there is one: copy them there"
        raise ConfigError("the sizes of the model are not known", why=error.message, help=help) from error
    return cast("Any", AutoModelForCausalLM).from_config(
        config_of(AutoConfig, section.model_path), trust_remote_code=False
    )


def _fullest(batch: RolloutBatch, micro: MicroBatches, parts: Sequence[list[int]]) -> PackedRow:
    """Return the packed row of most tokens."""
    return max((micro.pack(batch, part) for part in parts), key=lambda row: row.tokens.shape[1])


def _forward(policy: AnswerModel, row: PackedRow, temperature: float, *, entropy: bool) -> AnswerEval:
    found: Any = policy(row) if isinstance(policy, ValueModel) else policy(row, temperature, entropy=entropy)
    return AnswerEval(found, None) if isinstance(policy, ValueModel) else found


def _loss(policy: AnswerModel, row: PackedRow, temperature: float) -> Tensor:
    found = _forward(policy, row, temperature, entropy=True)
    return found.logprobs.sum() if found.entropy is None else found.logprobs.sum() + found.entropy.sum()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
