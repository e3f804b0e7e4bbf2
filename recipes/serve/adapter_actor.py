"""The workers that train adapters, accumulating gradients over passes until an optimizer step.

Losses are sums over tokens; thresholds bound the ratio, such as 0.8 and 1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.models.packing import MIN_SHARED, WIDEST
from recipes.language.models.policy import PLAIN, LanguagePolicy, check_policy
from recipes.serve.adapters import (
    OPTIMIZER,
    ModelVariants,
    are_finite,
    data_logprobs,
    gradient_norm,
    load_base,
    served_facts,
)
from recipes.serve.config import ServeConfig
from recipes.serve.values import HIGH, LOW, AdamSettings, AdapterSettings, Datum, FloatArray, RankOutcome, ServedFacts
from recipes.training.comparing_worker import ComparingWorker
from recipes.training.optimizer import EagerAdamW
from recipes.training.sharding import join_ranks
from recipes.training.tensor_files import read_tensors, write_tensors
from recipes.training.typed_tensors import pieces
from rlinf_core import RLinfError, WorkerDiedError


class UnusableGradientError(RLinfError):
    """Gradients that are NaN or infinite and were dropped."""


class UnusableWeightsError(RLinfError):
    """Weights that are NaN or infinite and are not saved."""


@dataclass(slots=True)
class _Trained:
    """A model that is trained.

    Attributes:
        settings: the settings of the adapter.
        optimizer: the optimizer of its weights.
        broken_by: the number of the step that made its weights NaN or infinite; 0: none.
    """

    settings: AdapterSettings
    optimizer: torch.optim.Optimizer
    broken_by: int = 0


class AdapterActor(ComparingWorker):
    """An actor that trains adapters, or all weights for the tenant of `server.full_weights`.

    Each rank has the whole model, and computes the gradients of its share of every batch.
    """

    config_section = "actor"

    def __init__(self, config: ServeConfig) -> None:
        super().__init__()
        self._config = config
        self._trained: dict[str, _Trained] = {}

    def init_worker(self, tokenizer_folder: str) -> ServedFacts:
        """Load or build the model.

        Args:
            tokenizer_folder: the folder to write the tokenizer to, for clients.

        Raises:
            ConfigError: the model cannot be loaded, or its log-probabilities differ from transformers'.
        """
        config = self._config.actor
        torch.set_num_threads(config.threads)
        tokenizer = make_tokenizer(config)
        model = load_base(self._config, tokenizer, self.torch_device)
        # Keep copies in float32, so that small steps add up.
        copy = partial(load_base, self._config, tokenizer, self.torch_device, torch.float32)
        computed = None if model.dtype == torch.float32 else model.dtype
        self._variants = ModelVariants(model, config.lora_alpha, copy, computed)
        policy = self._variants.policy
        name = type(model).__name__
        self._contact.compare(f"log-probabilities of `{name}`", PLAIN, lambda: check_policy(policy))
        if self._world_size > 1:
            join_ranks(self._rank, self._world_size, self.torch_device)
        if self._rank == 0:
            tokenizer.save_pretrained(tokenizer_folder)
        return served_facts(model, stop_token_ids(tokenizer, config.model.model_path))

    # Models

    def create(self, model: str, settings: AdapterSettings) -> None:
        """Create an adapter with initial values, or a copy of the model."""
        self._variants.add(model, settings)
        self._begin(model, settings)

    def restore(self, model: str, folder: str, optimizer: bool) -> None:
        """Create an adapter or a copy with saved weights, replacing any of that name.

        Args:
            model: the name of the adapter.
            folder: the folder that `save` wrote.
            optimizer: whether to restore the optimizer state, too.

        Raises:
            ConfigError: the weights belong to another model, or are not finite.
        """
        # Keep the old adapter until everything is read.
        arriving = f"{model}/arriving"
        state = read_tensors(Path(folder) / OPTIMIZER) if optimizer else {}
        settings = self._variants.load(arriving, Path(folder))
        self.remove(model)
        self._variants.rename(arriving, model)
        self._begin(model, settings)
        by_name = self._variants.parameters(model)
        for key, value in state.items():
            name, _, part = key.rpartition(":")
            self._trained[model].optimizer.state[by_name[name]][part] = value.to(self.torch_device)

    def remove(self, model: str) -> None:
        """Free an adapter and its optimizer."""
        if self._trained.pop(model, None) is not None:
            self._variants.remove(model)

    def save(self, model: str, folder: str, optimizer: bool) -> None:
        """Write an adapter into an existing folder, optionally with the optimizer state. Only rank 0 writes.

        Raises:
            UnusableWeightsError: a weight is NaN or infinite.
        """
        if self._rank:
            return
        trained = self._trained[model]
        if trained.broken_by:
            raise UnusableWeightsError(
                f"step {trained.broken_by} made weights of the model NaN or infinite: nothing was saved",
                help="load weights that were saved before it, and take smaller steps",
            )
        self._variants.save(model, trained.settings, Path(folder))
        if optimizer:
            states = self._states(model)
            flat = {f"{key}:{part}": value for key, state in states.items() for part, value in state.items()}
            write_tensors(Path(folder) / OPTIMIZER, flat)

    def _begin(self, model: str, settings: AdapterSettings) -> None:
        weights = list(self._variants.parameters(model).values())
        self._trained[model] = _Trained(settings, EagerAdamW(weights, lr=0.0, fused=True))

    def _states(self, model: str) -> dict[str, dict[str, Tensor]]:
        states = self._trained[model].optimizer.state
        return {key: states[weight] for key, weight in self._variants.parameters(model).items() if weight in states}

    # Learning

    def learn(
        self, model: str, data: list[Datum], loss: str, settings: Mapping[str, float], backward: bool
    ) -> RankOutcome:
        """Compute a loss over this rank's share of a batch, and add its gradients to those of earlier passes.

        Args:
            model: the name of the adapter.
            data: the batch of all ranks.
            loss: the name in `LOSSES`.
            settings: the settings of the loss.
            backward: whether to compute gradients.
        """
        logprobs: dict[int, FloatArray] = {}
        total = 0.0
        config = self._config.actor
        with self._computing(), self._variants.using(model) as policy, torch.set_grad_enabled(backward):
            masks = policy.takes_masks(max(len(datum.tokens) for datum in data))
            budget = config.max_tokens_per_micro_batch
            for part in shares(data, self._world_size, self._rank, budget, masks=masks):
                chosen = [data[number] for number in part]
                parts, value = self._loss(policy, chosen, loss, settings)
                if backward and value.requires_grad:
                    value.backward()
                total += float(value.detach())
                logprobs.update(zip(part, (piece.detach().cpu().numpy() for piece in parts), strict=True))
        return RankOutcome(logprobs, total)

    def _loss(
        self, policy: LanguagePolicy, data: list[Datum], loss: str, settings: Mapping[str, float]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the log-probabilities of each datum's targets, and the summed loss, a scalar."""
        flat = data_logprobs(policy, data, self.torch_device)
        sizes = [datum.values["target_tokens"].size for datum in data]
        shaped = [
            piece.reshape(datum.values["target_tokens"].shape)
            for piece, datum in zip(pieces(flat, sizes), data, strict=True)
        ]
        losses = [LOSSES[loss](piece, self._inputs(datum), settings) for piece, datum in zip(shaped, data, strict=True)]
        return shaped, torch.stack(losses).sum()

    def _inputs(self, datum: Datum) -> dict[str, Tensor]:
        return {
            name: torch.tensor(value, device=self.torch_device)
            for name, value in datum.values.items()
            if name != "target_tokens"
        }

    def drop_gradients(self, model: str) -> None:
        """Discard the gradients accumulated since the last step."""
        self._trained[model].optimizer.zero_grad()

    def step(self, model: str, adam: AdamSettings, number: int) -> dict[str, float]:
        """Take an optimizer step with the gradients of all ranks' passes since the last step, and drop them.

        Args:
            model: the name of the adapter.
            adam: the settings of the step.
            number: the number of the request, for errors.

        Raises:
            UnusableGradientError: a gradient is NaN or infinite; the weights are unchanged.
        """
        with self._computing():
            return self._step(self._trained[model], model, adam, number)

    def _step(self, trained: _Trained, model: str, adam: AdamSettings, number: int) -> dict[str, float]:
        optimizer = trained.optimizer
        weights = list(self._variants.parameters(model).values())
        self._sum_over_ranks(weights)
        norm = gradient_norm(weights)
        try:
            if not bool(norm.isfinite()):
                raise UnusableGradientError(
                    f"the gradient's norm is {float(norm)}: no step was taken, and the gradients were dropped",
                    help="look at the losses of the last batches",
                )
            if adam.grad_clip_norm > 0:
                nn.utils.clip_grads_with_norm_(weights, adam.grad_clip_norm, norm)
            for group in optimizer.param_groups:
                group.update(
                    lr=adam.learning_rate,
                    betas=(adam.beta1, adam.beta2),
                    eps=adam.eps,
                    weight_decay=adam.weight_decay,
                )
            optimizer.step()
            if not trained.broken_by and not are_finite(weights):
                trained.broken_by = number
        finally:
            optimizer.zero_grad()
        return {"grad_norm": float(norm)}

    @contextmanager
    def _computing(self) -> Generator[None, None, None]:
        """Turn a failure of the accelerator into the worker's death, as all later work would fail, too."""
        try:
            yield
        except torch.AcceleratorError as error:
            raise WorkerDiedError(str(self.worker_info.address), cause=str(error).partition("\n")[0]) from error

    def _sum_over_ranks(self, weights: list[nn.Parameter]) -> None:
        """Sum the gradients of all ranks; weights without gradients get zeros."""
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if self._world_size > 1:
                dist.all_reduce(weight.grad)


def shares(
    data: Sequence[Datum], world_size: int, rank: int, max_tokens: int, *, masks: bool = True
) -> list[list[int]]:
    """Return the micro-batches of a rank's share of a batch, as numbers of data; there may be none.

    Data with a common prefix are adjacent, so that few micro-batches compute it.

    Args:
        data: the batch of all ranks together.
        world_size, rank: the number of ranks, and the rank of this process.
        max_tokens: the approximate maximum tokens of a micro-batch, with common prefixes counted once; a longer datum
            is a micro-batch by itself.
        masks: whether the model accepts rows with a mask; if not, each datum costs as much as the longest.
    """
    # Big-endian bytes sort like the numbers.
    order = sorted(range(len(data)), key=lambda number: (data[number].tokens.astype(">u4").tobytes(), number))
    lengths = [len(data[number].tokens) for number in order]
    shared = [0, *(_beginning(data[one], data[other]) for one, other in pairwise(order))]
    ends = np.cumsum(np.subtract(lengths, shared))
    parts: list[list[int]] = []
    room, longest = -1, 0
    shares_row = WIDEST if masks else 0
    for place, number in enumerate(order):
        # The datum belongs to the rank whose share of all tokens contains the middle of the datum's tokens.
        middle = ends[place] - (lengths[place] - shared[place]) / 2
        # Clamp to the last rank: equal data add no tokens, so the last ones may lie at the very end.
        if min(world_size - 1, int(middle * world_size / ends[-1])) != rank:
            continue
        cost = lengths[place] - (shared[place] if parts else 0)
        longest = max(longest, lengths[place])
        is_wide = longest > shares_row and (len(parts[-1]) + 1 if parts else 1) * longest > max_tokens
        if cost > room or is_wide:
            parts.append([])
            room, cost, longest = max_tokens, lengths[place], lengths[place]
        parts[-1].append(number)
        room -= cost
    return parts


def _beginning(one: Datum, other: Datum) -> int:
    """Return the length of the common prefix of two data; 0 if not worth sharing."""
    shortest = min(len(one.tokens), len(other.tokens))
    common = int((one.tokens[:shortest] == other.tokens[:shortest]).cumprod().sum())
    return common if common >= MIN_SHARED else 0


_Inputs: TypeAlias = Mapping[str, Tensor]
_Settings: TypeAlias = Mapping[str, float]
_TokenLoss: TypeAlias = Callable[[Tensor, _Inputs, _Settings], Tensor]
"""A function that returns the summed loss over the tokens of one sequence, a scalar.

Its arguments are log-probabilities of the targets, float [N] or [N, K], inputs of that shape, and settings.
"""


def _cross_entropy(logprobs: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    return -(logprobs * inputs["weights"]).sum()


def _ratio(logprobs: Tensor, inputs: _Inputs) -> Tensor:
    return (logprobs - inputs["logprobs"]).exp()


def _clipped(ratio: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    """Return ratios clipped to the thresholds, which inputs may give per token."""
    low = inputs[LOW] if LOW in inputs else torch.as_tensor(settings[LOW])
    high = inputs[HIGH] if HIGH in inputs else torch.as_tensor(settings[HIGH])
    return torch.maximum(torch.minimum(ratio, high.to(ratio)), low.to(ratio))


def _importance_sampling(logprobs: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def _ppo(logprobs: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    """PPO's clipped objective (Schulman et al., arXiv 1707.06347, eq. 7)."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, settings) * advantages).sum()


def _cispo(logprobs: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): the clipped ratio is a weight, and has no gradient."""
    weight = _clipped(_ratio(logprobs, inputs), inputs, settings).detach()
    return -(weight * logprobs * inputs["advantages"]).sum()


def _dro(logprobs: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    """Direct reward optimization (Richemond et al., arXiv 2405.19107), per token, with advantages as rewards."""
    distance = (logprobs - inputs["logprobs"]).square()
    return -(logprobs * inputs["advantages"] - 0.5 * settings["beta"] * distance).sum()


def _gspo(logprobs: Tensor, inputs: _Inputs, settings: _Settings) -> Tensor:
    """GSPO's token form (Zheng et al., arXiv 2507.18071, eq. 14): the sequence's ratio is clipped, with token
    gradients.

    The ratio is the geometric mean over the tokens of `sequence_ratio_mask`, by default those with nonzero advantages.
    """
    advantages = inputs["advantages"]
    mask = inputs.get("sequence_ratio_mask")
    mask = (advantages != 0).to(logprobs) if mask is None else mask
    mean = ((logprobs - inputs["logprobs"]) * mask).sum() / mask.sum().clamp(min=1)
    ratio = mean.detach().exp() * (logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, _clipped(ratio, inputs, settings) * advantages).sum()


LOSSES: Final[Mapping[str, _TokenLoss]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
