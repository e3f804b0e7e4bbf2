"""Router replay: the trainer computes with the experts that the engine chose."""

# transformers has few types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.buffered_answers import UnfinishedGroup, load_unfinished, save_unfinished
from recipes.language.answers.sequences import Begun, Request, SamplingParams, Sequence
from recipes.language.engines.own.torch_engine import TorchEngine
from recipes.language.models.expert_choices import ExpertChoices
from recipes.language.models.expert_sizes import expert_sizes
from recipes.language.models.packing import pack
from recipes.language.models.policy import LanguagePolicy, checkpoint_decoder
from recipes.language.rules.architecture_rules import fault_of_architecture
from recipes.math.config import fault_of_replay
from rlinf_core import ConfigError
from tests.unit.recipes.language.models.architectures import VOCABULARY, architectures, tiny

# By softmax before and after the choice, with weights that add up to 1 or not, by a biased sigmoid; layers without.
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe")
PARAMS = SamplingParams(max_new_tokens=9)


def mixture(name: str = "qwen3_moe") -> Any:
    return tiny(architectures()[name])


def prompts_of(*lengths: int, common: int = 0) -> list[tuple[int, ...]]:
    random = torch.Generator().manual_seed(1)
    first = torch.randint(2, VOCABULARY, (common,), generator=random).tolist()
    return [(*first, *torch.randint(2, VOCABULARY, (length,), generator=random).tolist()) for length in lengths]


def answers_of(model: Any, prompts: list[tuple[int, ...]], **options: Any) -> list[Sequence]:
    engine = TorchEngine(model, records_experts=True, **options)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(request_id=str(number), prompt=prompt, params=PARAMS, group_size=3))
    return sorted(engine.results(), key=lambda answer: (answer.request_id, answer.sample))


def batch_of(answers: list[Sequence]) -> RolloutBatch:
    groups = sorted({answer.request_id for answer in answers})
    parts = [[answer for answer in answers if answer.request_id == group] for group in groups]
    return RolloutBatch.joined([RolloutBatch.of(part, number, [0.0] * len(part)) for number, part in enumerate(parts)])


def replaying(model: Any) -> LanguagePolicy:
    policy = LanguagePolicy(model)
    policy.replay_routers()
    return policy


def disturb(model: Any, scale: float = 0.3) -> Any:
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += scale * weight.std(correction=0) * torch.randn(weight.shape, generator=random)
    return model


@contextmanager
def observed_experts(model: Any) -> Generator[list[Tensor]]:
    """Collect the experts that layers of a model compute with, int64 [T, k] each."""
    seen: list[Tensor] = []
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [module.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone())) for module in experts]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", MIXTURES)
def test_replay_gives_the_engine_s_log_probabilities(name: str, share: bool) -> None:
    batch = batch_of(answers_of(mixture(name), prompts_of(5, 17, 11, common=12)))
    assert batch.replayed_tokens == int((batch.lengths - 1).sum())
    logprobs = replaying(mixture(name))(pack(batch, share_prompts=share)).logprobs
    torch.testing.assert_close(logprobs, batch.logprobs, atol=1e-5, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(architectures()))
def test_every_mixture_is_replayed_or_refused(name: str) -> None:
    try:
        model = mixture(name)
    except Exception as error:
        pytest.skip(f"no tiny model: {type(error).__name__}")
    settings = {**model.config.to_dict(), "model_type": name}
    if fault_of_architecture(settings, 100) or fault_of_replay(settings):
        pytest.skip("refused by validate")
    batch = batch_of(answers_of(model, prompts_of(5, 17)))
    assert batch.replayed_tokens == int((batch.lengths - 1).sum())
    torch.testing.assert_close(replaying(mixture(name))(pack(batch)).logprobs, batch.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_other_weights_keep_the_recorded_experts(name: str) -> None:
    batch = batch_of(answers_of(mixture(name), prompts_of(5, 17)))
    policy = replaying(disturb(mixture(name)))
    row = pack(batch)
    assert row.experts is not None
    with observed_experts(policy.causal) as own:
        free = policy(replace(row, experts=None, plan=pack(batch).plan)).logprobs
    with observed_experts(policy.causal) as replayed:
        logprobs = policy(row).logprobs
    recorded = [row.experts[:, layer].long() for layer in range(row.experts.shape[1])]
    recorded = [experts for experts in recorded if bool((experts >= 0).all())]
    assert len(recorded) == len(replayed) > 0
    for chosen, wanted, others in zip(replayed, recorded, own, strict=True):
        assert torch.equal(chosen, wanted)
        assert not torch.equal(others.sort().values, wanted.sort().values)
    assert (free - logprobs).abs().max() > 1e-3


def test_weights_of_replayed_experts_are_the_routers_own() -> None:
    batch = batch_of(answers_of(mixture(), prompts_of(6)))
    model = disturb(mixture())
    row = pack(batch)
    policy = replaying(model)
    gate = policy.causal.model.layers[0].mlp.gate
    passes: list[tuple[Tensor, Any]] = []
    gate.register_forward_hook(lambda _, args, output: passes.append((args[0], output)))
    policy(row).logprobs.sum().backward()
    hidden, output = passes[0]
    probabilities = (hidden.reshape(-1, 64) @ gate.weight.T).softmax(-1)
    assert row.experts is not None
    wanted = probabilities.gather(1, row.experts[:, 0].long())
    if gate.norm_topk_prob:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    torch.testing.assert_close(output[1], wanted)
    assert gate.weight.grad is not None
    assert gate.weight.grad.abs().sum() > 0


def test_checkpointed_layers_replay_in_the_backward_pass() -> None:
    batch = batch_of(answers_of(mixture(), prompts_of(5, 17)))
    gradients: list[list[Tensor]] = []
    for checkpoints in (False, True):
        policy = LanguagePolicy(disturb(mixture()))
        if checkpoints:
            checkpoint_decoder(policy)
        policy.replay_routers()
        policy(pack(batch)).logprobs.sum().backward()
        gradients.append([weight.grad for weight in policy.parameters() if weight.grad is not None])
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("options", [{"max_running_tokens": 90}, {"min_saved": 1}, {"share_prefixes": False}])
def test_no_choice_is_lost_however_prompts_are_stored(options: dict[str, Any]) -> None:
    prompts = prompts_of(5, 17, 11, 3, common=20)
    batch = batch_of(answers_of(mixture(), prompts, **options))
    whole = batch_of(answers_of(mixture(), prompts))
    assert batch.replayed_tokens == int((batch.lengths - 1).sum())
    assert torch.equal(batch.tokens, whole.tokens)
    assert torch.equal(batch.experts, whole.experts)


def test_frozen_answers_keep_choices_of_older_weights() -> None:
    (prompt,) = prompts_of(12)
    engine = TorchEngine(mixture(), records_experts=True)
    engine.submit(Request(request_id="0", prompt=prompt, params=PARAMS, group_size=2))
    for _ in range(4):
        engine.step()
    before = batch_of(engine.unfinished_answers())
    engine.pause("freeze")
    engine.load_weights(disturb(mixture()).state_dict().items(), 1)
    engine.resume()
    after = batch_of(list(engine.results()))
    assert after.replayed_tokens == int((after.lengths - 1).sum())
    for length, mine, theirs in zip(
        before.lengths.tolist(),
        after.experts.split(after.lengths.tolist()),
        before.experts.split(before.lengths.tolist()),
        strict=True,
    ):
        assert torch.equal(mine[: length - 1], theirs[:-1])


def test_a_continued_answer_has_all_its_choices() -> None:
    (prompt,) = prompts_of(12)
    whole = answers_of(mixture(), [prompt])[0]
    begun = Begun(tokens=whole.tokens[:4], logprobs=whole.logprobs[:4], versions=whole.versions[:4])
    engine = TorchEngine(mixture(), records_experts=True)
    engine.submit(Request(request_id="0", prompt=prompt, params=PARAMS, begun=begun))
    (answer,) = engine.results()
    assert (answer.tokens, answer.experts) == (whole.tokens, whole.experts)


def test_choices_survive_a_checkpoint(tmp_path: Path) -> None:
    answers = answers_of(mixture(), prompts_of(12))
    save_unfinished([UnfinishedGroup(7, tuple(answers))], tmp_path)
    (group,) = load_unfinished([7], tmp_path)
    assert [answer.experts for answer in group.answers] == [answer.experts for answer in answers]
    assert answers[0].experts is not None


def test_tokens_without_a_record_are_routed_and_counted() -> None:
    first, *others = answers_of(mixture(), prompts_of(12))
    batch = batch_of([replace(first, experts=None), *others])
    assert batch.replayed_tokens == int((batch.lengths[1:] - 1).sum())
    logprobs = replaying(mixture())(pack(batch, share_prompts=False)).logprobs
    torch.testing.assert_close(logprobs, batch.logprobs, atol=1e-5, rtol=0)
    joined = RolloutBatch.joined([batch, batch.without_experts()])
    assert joined.replayed_tokens == batch.replayed_tokens


def test_nothing_is_recorded_or_sent_when_off() -> None:
    engine = TorchEngine(mixture())
    engine.submit(Request(request_id="0", prompt=(5, 6, 7), params=PARAMS))
    batch = batch_of(list(engine.results()))
    assert batch.experts.numel() == 0
    assert pack(batch).experts is None


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_a_model_without_experts_is_refused(name: str) -> None:
    policy = LanguagePolicy(mixture(name))
    with pytest.raises(ConfigError, match="has no experts to choose from"):
        policy.replay_routers()


@pytest.mark.parametrize(("name", "words"), [("phimoe", "do not choose"), ("jetmoe", "chooses experts twice")])
def test_routers_that_choose_otherwise_are_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answers_of(mixture(name), prompts_of(4))


def test_other_choices_of_a_layer_are_left_alone() -> None:
    sizes = expert_sizes({"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1})
    assert sizes is not None
    choices = ExpertChoices(sizes, torch.zeros(3, 1, 2, dtype=torch.int16))
    scores = torch.arange(24.0).view(3, 8)
    choices.enter(0)
    groups, experts = scores.view(3, 2, 4).topk(2, dim=-1)[1], torch.topk(scores, 2, dim=-1)
    choices.leave()
    assert groups.tolist() == [[[3, 2]] * 2] * 3
    assert experts.indices.tolist() == [[0, 0]] * 3
    assert torch.equal(experts.values, scores[:, :1].expand(3, 2))
    assert torch.topk(scores, 2, dim=-1).indices.tolist() == [[7, 6]] * 3
