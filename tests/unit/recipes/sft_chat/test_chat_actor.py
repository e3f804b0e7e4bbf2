"""The workers that learn from conversations, and the rules about their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import ones
from torch.nn.functional import cross_entropy

from recipes.language.models.policy import plain_attention
from recipes.sft_chat.examples import ChatExample, micro_batches, pack_examples
from tests.unit.recipes.sft_chat.chats import actor_of, jsonl, turns


def weights(actor: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in actor._state.policy.state_dict().items()}


def padded_loss(model: Any, examples: list[ChatExample]) -> torch.Tensor:
    """Return the mean loss of the target tokens in one padded batch, as a plain loop over transformers has it."""
    longest = max(len(example.tokens) for example in examples)
    tokens, mask = torch.zeros(len(examples), longest, dtype=torch.int64), torch.zeros(len(examples), longest)
    labels = torch.full((len(examples), longest), -100)
    for row, example in enumerate(examples):
        count = len(example.tokens)
        tokens[row, :count], mask[row, :count] = example.tokens.long(), 1
        labels[row, :count] = torch.where(example.trained, example.tokens.long(), -100)
    logits = model(input_ids=tokens, attention_mask=mask).logits
    return cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))


@pytest.mark.parametrize("most", [16, 4096])
def test_loss_and_step_equal_those_of_a_padded_loop(most: int) -> None:
    actor = actor_of(f"actor.max_tokens_per_micro_batch={most}", "data.shuffle=false", "actor.optim.clip_grad=0")
    model = actor._state.policy.causal
    with plain_attention(model):
        expected = padded_loss(model, actor._examples.examples[:8])
        expected.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    passes = actor._passes(actor._examples, range(8))
    losses = [actor._loss(part).loss / len(passes) for part in passes]
    assert (len(passes) > 1) == (most == 16)
    assert sum(float(loss.detach()) for loss in losses) == pytest.approx(float(expected), abs=1e-5)
    for loss in losses:
        loss.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-5, rtol=1e-4)


def test_metrics_tell_loss_and_place_in_the_data() -> None:
    actor = actor_of()
    metrics = actor.learn(5, 10)
    assert metrics["train/epoch"] == 1.0
    assert metrics["train/actor/loss"] > 0
    assert metrics["train/actor/lr"] < actor._config.actor.optim.lr
    assert actor._state.version == 1


def test_what_was_shown_is_learned() -> None:
    actor = actor_of("actor.optim.lr=0.01")
    first = actor.evaluate()["eval/loss"]
    for step in range(1, 30):
        actor.learn(step, 1000)
    assert actor.evaluate()["eval/loss"] < first - 1


def test_a_step_depends_on_its_number_alone() -> None:
    one, other = actor_of(), actor_of()
    torch.manual_seed(1)
    one.learn(2, None)
    torch.manual_seed(2)
    other.learn(2, None)
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_checkpoint_continues_to_the_same_weights(tmp_path: Path) -> None:
    whole, resumed = actor_of(), actor_of()
    for step in (1, 2):
        whole.learn(step, 4)
    whole.save_checkpoint(str(tmp_path))
    assert resumed.load_checkpoint(str(tmp_path)) == 2
    whole.learn(3, 4)
    resumed.learn(3, 4)
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())


def test_rows_left_out_are_warned_of(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "sums.jsonl", [{"messages": turns("1+1=", "2" * n)} for n in (1, 80, 2)])
    actor = actor_of("data.type=chat", f"data.train_data_paths={file}", "~data.train_size")
    assert actor.counts == (2, 0)
    assert actor.warnings == ["skipped 1 rows of more than 64 tokens (`data.overlong`)"]


def test_ranks_share_a_batch_in_as_many_passes() -> None:
    lengths = [10, 90, 20, 30, 70, 40]
    parts = [micro_batches(lengths, range(6), 2, rank, 60, masks=True) for rank in (0, 1)]
    assert len(parts[0]) == len(parts[1])
    assert sorted(number for rank in parts for part in rank for number in part) == list(range(6))
    tokens = [sum(lengths[number] for part in rank for number in part) for rank in parts]
    assert max(tokens) <= min(tokens) + 20


def test_empty_pass_has_a_loss_without_targets() -> None:
    actor = actor_of()
    evaluated = actor._state.policy(pack_examples([]))
    (evaluated.logprobs.sum() * 1).backward()
    assert len(evaluated.logprobs) == 0


def test_packed_rows_have_the_learned_tokens_as_targets() -> None:
    parts = ([5, 6, 7], [False, False, True]), ([8, 9], [False, True]), ([1], [True])
    rows = pack_examples([ChatExample.of(*part) for part in parts])
    assert rows.tokens.tolist() == [[5, 6], [8, 0]]
    assert (rows.predictors.tolist(), rows.targets.tolist()) == ([1, 2], [7, 9])


JOB = """\
recipe: sft
cluster:
  num_nodes: 1
  component_placement:
    actor: {node_group: node, placement: 0}
actor: {global_batch_size: 4, model: {model_path: MODEL}}
data: {type: chat, train_data_paths: ROWS}
runner: {seq_length: 64}
"""
TEXTS = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("rows", "settings", "template", "refused"),
    [
        ([{"messages": turns("a", "b")}], "", False, True),
        ([{"messages": turns("a", "b")}], "", True, False),
        ([TEXTS, TEXTS], "data.apply_chat_template=false", False, False),
        ([TEXTS, TEXTS], "data.apply_chat_template=true", False, True),
    ],
)
def test_messages_need_a_chat_template_before_a_run(
    findings: Any, tmp_path: Path, rows: list[Any], settings: str, template: bool, refused: bool
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 3}')
    (folder / "model.safetensors").write_bytes(save({"one": ones(1)}))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"} if template else {}))
    file = jsonl(tmp_path / "chat.jsonl", rows)
    text = JOB.replace("MODEL", str(folder)).replace("ROWS", str(file))
    reported = findings(text, *([settings] if settings else []), messages=True)
    errors = [(code, "no chat template" in message) for code, _, message, _ in reported]
    assert errors == [("unusable-path", True)] * refused
