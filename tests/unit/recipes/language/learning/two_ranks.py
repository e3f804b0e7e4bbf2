"""One of two ranks that train together, over gloo.

    python -m tests.unit.recipes.language.learning.two_ranks RANK FOLDER

`CASES` are the ways to train one batch. `train` takes one optimizer step and returns what there is to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.learning.learner import LanguageLearner, LearnerSettings, ValueLearner
from recipes.language.learning.token_targets import TokenTargets, token_advantages
from recipes.language.models.policy import LanguagePolicy, ValueModel
from recipes.sections.actor import FsdpConfig, LoraSettings
from recipes.training.huggingface import with_lora
from recipes.training.sharding import parallelize
from rlinf_core.algorithms.advantages import AdvantageSettings, grpo
from rlinf_core.algorithms.loss_inputs import LossSettings
from rlinf_core.algorithms.losses import actor
from tests.unit.recipes.language.tiny import random_batch, tiny_model
from tests.unit.recipes.two_processes import as_rank


@dataclass(frozen=True)
class Case:
    """A way to train a batch of six groups.

    Attributes:
        groups: of each rank.
        sharding: `fsdp_config.sharding_strategy`.
        lora: whether adapters alone are trained.
        values: whether values are learned, and not a policy.
        settings: of the learner.
        how: `loss_agg_func`.
        half: whether layers compute in bfloat16.
    """

    groups: Sequence[Sequence[int]] = ((0, 1, 5), (2, 3, 4))
    sharding: str = "full_shard"
    lora: bool = False
    values: bool = False
    settings: LearnerSettings = LearnerSettings(clip_grad=0.05)  # noqa: RUF009 - it is frozen
    how: Any = "token-mean"
    half: bool = False


# The same passes for any number of ranks: rounding to half the bits depends on what is computed together.
_ONE_BY_ONE = LearnerSettings(clip_grad=0.05, max_tokens=1)

CASES: Mapping[str, Case] = {
    "FSDP2": Case(),
    "FSDP2, several micro-batches": Case(settings=LearnerSettings(max_tokens=40), how="seq-mean-token-mean"),
    "FSDP2, prompts by themselves": Case(settings=LearnerSettings(masks=False, max_tokens=60)),
    "FSDP2, one rank has nothing": Case(groups=((0, 1, 2, 3, 4, 5), ()), settings=LearnerSettings(max_tokens=50)),
    "FSDP2, gradients stay whole": Case(sharding="shard_grad_op", how="seq-mean-token-sum"),
    "FSDP2, several optimizer steps": Case(settings=LearnerSettings(minibatches=2, epochs=2, max_tokens=40)),
    "LoRA": Case(lora=True),
    "LoRA, replicas": Case(lora=True, sharding="no_shard"),
    "replicas": Case(sharding="no_shard", settings=LearnerSettings(max_tokens=40)),
    "bfloat16": Case(half=True, settings=_ONE_BY_ONE),
    "bfloat16, replicas": Case(half=True, settings=_ONE_BY_ONE, sharding="no_shard"),
    "bfloat16, LoRA": Case(half=True, settings=_ONE_BY_ONE, lora=True),
    "bfloat16, values": Case(half=True, settings=_ONE_BY_ONE, values=True),
    "values": Case(values=True),
    "values, several optimizer steps": Case(values=True, settings=LearnerSettings(minibatches=3)),
}


def train(case: Case, rank: int, world_size: int) -> dict[str, Any]:
    """Return metrics, log-probabilities before the step, and weights after it."""
    torch.manual_seed(0)
    model: Any = tiny_model()
    if case.lora:
        model = with_lora(model, LoraSettings(rank=2, alpha=8.0))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.1)
    module = ValueModel(model) if case.values else LanguagePolicy(model)
    fsdp = FsdpConfig(sharding_strategy=case.sharding)  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16} if case.half else {}
    options["exact"] = [module.value_head] if isinstance(module, ValueModel) else []
    strategy = parallelize(module, rank, world_size, fsdp, torch.device("cpu"), module.blocks, **options)
    optimizer = torch.optim.SGD([weight for weight in module.parameters() if weight.requires_grad], lr=0.5)
    whole = random_batch(3, groups=6, size=3, common=9)
    whole = replace(whole, minibatches=whole.groups % case.settings.minibatches)
    wanted = case.groups[rank] if world_size > 1 else range(6)
    rows = [row for row, group in enumerate(whole.groups.tolist()) if group in wanted]
    batch = whole.select(torch.tensor(rows, dtype=torch.int64))
    loss, device = LossSettings(loss_agg_func=case.how), torch.device("cpu")
    if isinstance(module, ValueModel):
        learner = ValueLearner(strategy, optimizer, loss, case.settings, device)
        tokens, figures = learner.evaluate(batch), learner.train(batch, batch.logprobs * 2, batch.logprobs, 0)
    else:
        policy = LanguageLearner(module, strategy, optimizer, actor, loss, case.settings, device)
        tokens = policy.evaluate(batch)
        figures = policy.train(batch, _targets(batch), 0)
    weights: dict[str, Tensor] = module.state_dict()
    return {
        "metrics": figures.means(),
        "tokens": dict(zip(rows, tokens.split(batch.answer_lengths.tolist()), strict=True)),
        "weights": {name: strategy.full_tensor(value).clone() for name, value in weights.items()},
    }


def _targets(batch: RolloutBatch) -> TokenTargets:
    advantages, _ = token_advantages(batch, grpo, AdvantageSettings(group_size=3))
    return TokenTargets(advantages=advantages, old_logprobs=batch.logprobs)


if __name__ == "__main__":
    as_rank(lambda rank, _: {name: train(case, rank, 2) for name, case in CASES.items()})
