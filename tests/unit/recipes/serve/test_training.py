"""Adapters of one model, packed rows whose common beginnings are computed once, and losses against loops."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.serve.adapter_actor import LOSSES, shares
from recipes.serve.adapters import ModelVariants, data_logprobs
from recipes.serve.values import LOSS_INPUTS, AdapterSettings, Datum
from rlinf_core import ConfigError


def adapters(seed: int = 0, hidden: int = 32) -> ModelVariants:
    build = partial(built_model, built_tokenizer(), hidden_dim=hidden, layers=1, seed=seed)
    return ModelVariants(build(), 32.0, build)


def data(*lengths: int) -> list[Datum]:
    tokens = [torch.arange(3, 3 + length) for length in lengths]
    return [Datum(row.numpy(), {"target_tokens": row.numpy()}) for row in tokens]


def logprobs(model: ModelVariants, name: str | None) -> torch.Tensor:
    with model.using(name), torch.no_grad():
        return data_logprobs(model.policy, data(5))


def changed(model: ModelVariants, name: str) -> None:
    with torch.no_grad():
        for weight in model.parameters(name).values():
            weight.add_(0.1)


def test_new_adapter_changes_nothing() -> None:
    model = adapters()
    plain = logprobs(model, None)
    model.add("a", AdapterSettings(4, 1))
    torch.testing.assert_close(logprobs(model, "a"), plain)


def test_adapter_of_the_output_layer_alone_is_asked_for() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    # All layers of GPT-2 but the last are `Conv1D`.
    built = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=1))
    model = ModelVariants(built, 32.0, lambda: built)
    with pytest.raises(ConfigError, match="`GPT2LMHeadModel` has no `Linear` layers"):
        model.add("a", AdapterSettings(4, 1))
    model.add("b", AdapterSettings(4, 1, train_attn=False, train_mlp=False))
    assert all("lm_head" in name for name in model.parameters("b"))


def test_adapters_are_computed_with_one_at_a_time() -> None:
    model = adapters()
    for name, rank in (("a", 4), ("b", 8)):
        model.add(name, AdapterSettings(rank, 1))
    plain = logprobs(model, None)
    changed(model, "a")
    assert not torch.allclose(logprobs(model, "a"), plain)
    torch.testing.assert_close(logprobs(model, "b"), plain)
    assert {weight.shape[0] for name, weight in model.parameters("b").items() if "lora_A" in name} == {8}
    model.remove("a")
    torch.testing.assert_close(logprobs(model, "b"), plain)
    assert "a" not in model


def test_removed_adapters_leave_nothing() -> None:
    model = adapters()
    model.add("a", AdapterSettings(4, 1))
    names = {name for name, _ in model.model.named_modules()}
    for _ in range(3):
        model.add("b", AdapterSettings(4, 1))
        model.remove("b")
    assert {name for name, _ in model.model.named_modules()} == names
    assert len(model.model.peft_config) == 1


def test_first_values_come_from_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import peft

    right = adapters()
    torch.manual_seed(5)
    right.add("a", AdapterSettings(4, 1))
    inject = peft.inject_adapter_in_model

    def interrupted(*args: Any) -> Any:
        torch.rand(3)  # from the generator of the process, as a thread that samples would
        return inject(*args)

    monkeypatch.setattr(peft, "inject_adapter_in_model", interrupted)
    model = adapters()
    torch.manual_seed(6)
    model.add("a", AdapterSettings(4, 1))
    for name, weight in model.parameters("a").items():
        assert torch.equal(weight, right.parameters("a")[name])


@pytest.mark.parametrize(("kind", "layers"), [("attn", {"self_attn"}), ("mlp", {"mlp"}), ("unembed", {"lm_head"})])
def test_kinds_of_layers_are_chosen(kind: str, layers: set[str]) -> None:
    model = adapters()
    others = {f"train_{other}": other == kind for other in ("attn", "mlp", "unembed")}
    model.add("a", AdapterSettings(4, 1, **others))
    names = {part for name in model.parameters("a") for part in name.split(".")}
    assert names & {"self_attn", "mlp", "lm_head"} == layers


def test_saved_adapter_is_read_by_us_and_by_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    model, settings = adapters(), AdapterSettings(4, 1)
    model.add("a", settings)
    changed(model, "a")
    model.save("a", settings, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    other = adapters()
    assert other.load("b", tmp_path) == settings
    assert torch.equal(logprobs(other, "b"), logprobs(model, "a"))
    base: Any = built_model(built_tokenizer(), hidden_dim=32, layers=1)
    theirs: Any = PeftModel.from_pretrained(base, str(tmp_path))
    tokens = data(5)[0].tokens
    scores = theirs(input_ids=torch.tensor(tokens[None])).logits[0].log_softmax(-1)
    right = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(logprobs(model, "a"), right.detach(), atol=1e-5, rtol=1e-5)


def test_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model, settings = adapters(), AdapterSettings(4, 1)
    model.add("a", settings)
    model.save("a", settings, tmp_path)
    other = adapters(hidden=64)
    with pytest.raises(ConfigError, match="another model"):
        other.load("b", tmp_path)
    assert "b" not in other


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_share_a_batch(world_size: int) -> None:
    rows = [np.arange(10 * number, 10 * number + length) for number, length in enumerate((5, 2, 9, 3))]
    batch = [Datum(row, {"target_tokens": row}) for row in rows]
    parts = [shares(batch, world_size, rank, 9) for rank in range(world_size)]
    assert sorted(number for rank in parts for part in rank for number in part) == [0, 1, 2, 3]
    assert all(sum(len(batch[number].tokens) for number in part) <= 9 for rank in parts for part in rank)


def datum(tokens: list[int], targets: Any = None) -> Datum:
    wanted = np.asarray([*tokens[1:], 4] if targets is None else targets, np.int64)
    return Datum(np.asarray(tokens, np.int64), {"target_tokens": wanted})


def rows_of(seed: int) -> list[list[int]]:
    """Return groups that continue prompts, which continue examples; prefixes, repetitions, and others among them."""
    draw = random.Random(seed)

    def pieces(most: int) -> list[int]:
        return [draw.randrange(3, 8) for _ in range(draw.randint(1, most))]

    examples = pieces(20)
    prompts = [examples + pieces(9) for _ in range(4)]
    rows = [prompt + pieces(5) for prompt in prompts for _ in range(4)]
    rows += [list(draw.choice(rows)), examples, pieces(30), examples + pieces(3), [3]]
    draw.shuffle(rows)
    return rows


def nested(levels: int) -> list[list[int]]:
    return [[3 + place % 5 for place in range(7 * level + 1)] + [9] for level in range(levels)]


@pytest.mark.parametrize("rows", [*map(rows_of, range(6)), nested(9), [[5]], [[5], [5]]])
def test_shared_beginnings_change_no_result(rows: list[list[int]]) -> None:
    policy = LanguagePolicy(built_model(built_tokenizer(), hidden_dim=32, layers=2, seed=1))
    with torch.no_grad():
        together = data_logprobs(policy, [datum(row) for row in rows])
        apart = torch.cat([data_logprobs(policy, [datum(row)]) for row in rows])
    torch.testing.assert_close(together, apart, atol=2e-6, rtol=1e-5)


def test_shared_beginnings_change_no_gradient() -> None:
    rows = rows_of(0)
    gradients = list[torch.Tensor]()
    for batches in ([rows], [[row] for row in rows]):
        model = built_model(built_tokenizer(), hidden_dim=32, layers=2, seed=1)
        for batch in batches:
            data_logprobs(LanguagePolicy(model), [datum(row) for row in batch]).square().sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_each_datum_is_in_one_micro_batch(seed: int, world_size: int) -> None:
    data = [datum(row) for row in [*rows_of(seed), *[[3, 4, 5]] * 9]]
    parts = [part for rank in range(world_size) for part in shares(data, world_size, rank, 40)]
    assert sorted(number for part in parts for number in part) == list(range(len(data)))


def test_micro_batches_keep_common_beginnings_together() -> None:
    draw = np.random.default_rng(0)
    prompts = [[*range(3, 20), *draw.integers(3, 90, 12).tolist()] for _ in range(16)]
    data = [datum(prompt + draw.integers(3, 90, 4).tolist()) for prompt in prompts for _ in range(8)]
    draw.shuffle(data)
    parts = shares(data, 1, 0, 200)
    beginnings = [{tuple(data[number].tokens[:29]) for number in part} for part in parts]
    # Besides its own, a micro-batch repeats one beginning.
    assert sum(map(len, beginnings)) <= 16 + len(parts)
    assert max(map(len, parts)) > 8


LOW, HIGH, BETA = 0.9, 1.1, 0.3


def expected(loss: str, new: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Return the loss of one sequence, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    active = [place for place in range(len(new)) if advantages[place] != 0]
    mean = sum(float((new[place] - old[place]).detach()) for place in active) / len(active)
    for place in range(len(new)):
        ratio, advantage = torch.exp(new[place] - old[place]), advantages[place]
        if loss == "cross_entropy":
            total = total - weights[place] * new[place]
        elif loss == "importance_sampling":
            total = total - ratio * advantage
        elif loss == "ppo":
            clipped = min(max(float(ratio), LOW), HIGH) * float(advantage)
            total = total - (ratio * advantage if float(ratio * advantage) <= clipped else clipped)
        elif loss == "cispo":
            total = total - min(max(float(ratio.detach()), LOW), HIGH) * advantage * new[place]
        elif loss == "dro":
            total = total - (new[place] * advantage - BETA / 2 * (new[place] - old[place]) ** 2)
        else:
            whole = math.exp(mean)
            clipped = min(max(whole, LOW), HIGH) * float(advantage)
            token = whole * torch.exp(new[place] - float(new[place]))
            total = total - (token * advantage if whole * float(advantage) <= clipped else clipped)
    return total


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_match_a_loop(loss: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new = -torch.rand(9, generator=generator, dtype=torch.float64) * 3
    old = new + 0.3 * torch.randn(9, generator=generator, dtype=torch.float64)
    advantages = torch.randn(9, generator=generator, dtype=torch.float64)
    advantages[:2] = 0
    weights = torch.randn(9, generator=generator, dtype=torch.float64)
    mine, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    inputs = {"weights": weights, "logprobs": old, "advantages": advantages}
    settings = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH, "beta": BETA}
    value, right = LOSSES[loss](mine, inputs, settings), expected(loss, theirs, old, advantages, weights)
    value.backward()
    right.backward()
    torch.testing.assert_close(value, right)
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_losses_and_their_inputs_have_the_same_names() -> None:
    assert set(LOSSES) == set(LOSS_INPUTS)


def test_thresholds_of_tokens_replace_those_of_the_loss() -> None:
    new, old = torch.log(torch.tensor([2.0, 2.0])), torch.zeros(2)
    inputs = {"logprobs": old, "advantages": torch.ones(2), "clip_high_threshold": torch.tensor([1.5, 5.0])}
    value = LOSSES["ppo"](new, inputs, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
    assert float(value) == pytest.approx(-(1.5 + 2.0))


def test_gspo_mask_chooses_the_tokens_of_the_ratio() -> None:
    new, old = torch.tensor([0.1, -2.0]), torch.tensor([0.0, 0.0])
    inputs = {"logprobs": old, "advantages": torch.tensor([1.0, 0.0]), "sequence_ratio_mask": torch.tensor([1.0, 0.0])}
    value = LOSSES["gspo"](new, inputs, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0})
    assert float(value) == pytest.approx(-math.exp(0.1))
