"""Actor, critic and reference of a job, in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from torch import Tensor
from torch.testing import assert_close

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.learning.learner import LanguageLearner, TokenTargets
from recipes.language.models.load_model import built_model, built_tokenizer
from recipes.training.state.shard_files import ShardReader
from recipes.training.state.training_state import TrainingState
from rlinf_core import ConfigError, RLinfError
from tests.unit.recipes.language.in_process import LocalJob

SMALL = ("data.rollout_batch_size=4", "algorithm.group_size=4", "actor.model.hidden_dim=32", "actor.model.num_layers=1")
REFERENCE = "cluster.component_placement={'actor,rollout,reward,reference': {node_group: node, placement: 0}}"

BF16 = "actor.model.precision=bf16"

# One optimizer step of full size in every training step.
PLAIN = ("algorithm.n_minibatches=1", "actor.optim.lr_warmup_steps=0", "actor.optim.lr_scheduler=constant")


def job(name: str = "math_laptop", *overrides: str, warm_start: int = 2) -> LocalJob:
    plain = PLAIN if name == "math_laptop" else ()
    return LocalJob(name, *SMALL, *plain, f"actor.warm_start.steps={warm_start}", *overrides)


def half_right(batch: RolloutBatch) -> RolloutBatch:
    """Return a batch in which every other answer is right: so small a model knows nothing."""
    return replace(batch, rewards=torch.arange(len(batch)).remainder(2).float())


def test_ppo_trains_a_critic_and_resumes_to_the_bit(tmp_path: Path) -> None:
    ppo = "math_laptop_ppo"
    straight = job(ppo)
    before = straight.weights()
    for step in (1, 2):
        straight.step(step, half_right)
    straight.save(tmp_path)
    after = straight.weights()
    assert {name.split(".")[0] for name, value in after.items() if not torch.equal(value, before[name])} == {
        "actor",
        "critic",
    }
    assert straight.metrics["train/critic/value_loss"] > 0
    assert straight.metrics["train/critic/grad_norm"] > 0
    assert "train/critic/explained_variance" in straight.metrics
    straight.step(3, half_right)

    resumed = job(ppo)
    resumed.load(tmp_path)
    resumed.step(3, half_right)

    assert (tmp_path / "critic").is_dir()
    expected = straight.weights()
    for name, value in resumed.weights().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("lora", [False, True])
def test_the_policy_begins_where_its_reference_is(lora: bool) -> None:
    inputs = ["algorithm.kl_beta=0.5", REFERENCE]
    inputs += ["actor.model.lora={rank: 2}", "actor.optim.lr=0.01"] if lora else []
    made = job("math_laptop", *inputs)
    made.step(1, half_right)
    assert made.metrics["train/actor/kl_ref"] == pytest.approx(0, abs=1e-5)
    made.step(2, half_right)
    assert made.metrics["train/actor/kl_ref"] > 1e-5


def test_the_actor_without_its_adapters_is_a_reference() -> None:
    inputs = ("algorithm.kl_beta=0.5", "actor.model.lora={rank: 2}")
    alone = job("math_laptop", *inputs, warm_start=0)
    placed = job("math_laptop", *inputs, REFERENCE, warm_start=0)
    assert alone.reference is None
    for step in (1, 2, 3):
        alone.step(step, half_right)
        placed.step(step, half_right)
        results, expected = (item.metrics["train/actor/kl_ref"] for item in (alone, placed))
        assert results == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert all(".lora_" in name for name, value in _changed(alone) if value)


def _changed(made: LocalJob) -> list[tuple[str, bool]]:
    fresh = job("math_laptop", "actor.model.lora={rank: 2}", warm_start=0).weights()
    return [(name, not torch.equal(value, fresh[name])) for name, value in made.weights().items()]


def test_adapter_checkpoint_holds_adapters_alone_and_resumes(tmp_path: Path) -> None:
    lora = "actor.model.lora={rank: 2}"
    whole, adapters = job("math_laptop"), job("math_laptop", lora)
    for name, made in (("whole", whole), ("adapters", adapters)):
        made.step(1, half_right)
        made.save(tmp_path / name)
    keys = ShardReader(tmp_path / "adapters" / "actor").tensors
    weights = [name for name in keys if name.startswith("model.")]
    assert weights
    assert all(".lora_" in name for name in weights)
    adapters.step(2, half_right)

    resumed = job("math_laptop", lora)
    resumed.load(tmp_path / "adapters")
    resumed.step(2, half_right)

    expected = adapters.weights()
    for name, value in resumed.weights().items():
        assert torch.equal(value, expected[name]), name


def test_a_divergence_in_the_reward_lowers_the_advantages() -> None:
    inputs = ("algorithm.kl_beta=0.5", "algorithm.kl_in_reward=true", "algorithm.adv_type=reinforce_pp")
    made = job("math_laptop", *inputs, REFERENCE)
    for step in (1, 2, 3):
        made.step(step, half_right)
    assert made.metrics["train/kl_in_reward"] > 0
    assert "train/actor/kl_ref" not in made.metrics


@pytest.mark.parametrize(
    "setting",
    [
        ("algorithm.adv_type=dr_grpo", "algorithm.loss_agg_func=seq-mean-token-sum-norm"),
        ("algorithm.adv_type=rloo", "algorithm.entropy_bonus=0.01"),
        ("algorithm.loss_type=gspo", "algorithm.loss_agg_func=seq-mean-token-mean", "algorithm.n_minibatches=2"),
        ("algorithm.loss_type=decoupled_actor", "algorithm.recompute_logprobs=true"),
        ("algorithm.tis_cap=2", "algorithm.recompute_logprobs=true", "algorithm.update_epoch=2"),
    ],
)
def test_algorithms_by_name(setting: tuple[str, ...]) -> None:
    made = job("math_laptop", *setting)
    made.step(1, half_right)
    assert made.metrics["train/actor/grad_norm"] > 0
    assert made.metrics["train/logprob_gap/max"] < 1e-4
    if "algorithm.recompute_logprobs=true" in setting:
        assert made.metrics["train/actor/behaviour_weight"] == pytest.approx(1, abs=1e-4)


def _another_engine(batch: RolloutBatch) -> RolloutBatch:
    """Return a batch as if an engine of other weights had drawn it."""
    return replace(half_right(batch), logprobs=batch.logprobs - 0.3)


def _older_weights(batch: RolloutBatch) -> RolloutBatch:
    return replace(_another_engine(batch), versions=batch.versions - 1)


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_another_model_in_the_engine_is_told_or_ends_the_run(recompute: str) -> None:
    inputs = (f"algorithm.recompute_logprobs={recompute}",)
    for check, warned in (("off", 0), ("warn", 1)):
        made = job("math_laptop", *inputs, f"rollout.check_logprobs={check}")
        made.step(1, _another_engine)
        assert made.metrics["train/logprob_gap/mean"] == pytest.approx(0.3, abs=1e-4)
        assert len(made.warnings) == warned
        made.step(2, _older_weights)
        assert "train/logprob_gap/mean" not in made.metrics
        assert len(made.warnings) == warned
    strict = job("math_laptop", *inputs, "rollout.check_logprobs=strict")
    strict.step(1, half_right)
    with pytest.raises(RLinfError, match=r"differ by up to 0\.3, more than 0\.01"):
        strict.step(2, _another_engine)


def test_memory_is_bought_with_time_and_gives_the_same() -> None:
    inputs: dict[str, tuple[str, ...]] = {
        "plain": (),
        "again": ("actor.fsdp_config={gradient_checkpointing: true}",),
        "small": ("actor.max_tokens_per_micro_batch=40",),
        "few": ("actor.micro_batch_size=3",),
    }
    weights: dict[str, Any] = {}
    for name, item in inputs.items():
        made = job("math_laptop", *item)
        made.step(1, half_right)
        weights[name] = made.weights()
    for name in ("again", "small", "few"):
        for key, value in weights[name].items():
            torch.testing.assert_close(value, weights["plain"][key], atol=2e-4, rtol=1e-4)


def test_steps_smaller_than_half_the_bits_tell_add_up() -> None:
    made = job("math_laptop", BF16, "actor.optim.lr=1e-6")
    before = made.weights()
    made.step(1, half_right)
    after = made.weights()
    head = "actor.model.lm_head.weight"
    assert after[head].dtype == torch.float32
    changed = after[head] != before[head]
    assert changed.float().mean() > 0.5
    # In bfloat16 hardly any of these steps would have been one.
    assert (after[head].bfloat16() != before[head].bfloat16()).float().mean() < 0.1
    assert made.metrics["train/actor/grad_norm"] > 0


@pytest.mark.parametrize("setting", [(), ("actor.model.lora={rank: 2}",)])
def test_half_precision_is_for_engines_not_for_checkpoints(tmp_path: Path, setting: tuple[str, ...]) -> None:
    from safetensors.torch import load_file

    straight = job("math_laptop", BF16, *setting)
    for step in (1, 2):
        straight.step(step, half_right)
        if step == 1:
            straight.save(tmp_path)
    resumed = job("math_laptop", BF16, *setting)
    resumed.load(tmp_path)
    resumed.step(2, half_right)

    expected = straight.weights()
    for name, value in resumed.weights().items():
        assert torch.equal(value, expected[name]), name
    stored = ShardReader(tmp_path / "actor").tensors
    assert {item.properties.dtype for name, item in stored.items() if name != "version"} == {torch.float32}
    sent = straight.actor._state.sent_weights()  # pyright: ignore[reportPrivateUsage]
    for places, piece in zip(sent.pieces, sent.tensors(), strict=True):
        assert piece.dtype == torch.bfloat16
        for place in places:
            assert torch.equal(place.of(piece), expected[f"actor.{place.name}"].bfloat16()), place.name

    straight.actor.save_model(str(tmp_path / "model"))
    assert {item.dtype for item in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_reference_of_half_the_bits_is_where_the_policy_begins() -> None:
    """Also where the first pass of all is one without the adapters."""
    for inputs in (("actor.model.lora={rank: 2}",), (REFERENCE,), (REFERENCE, "actor.model.lora={rank: 2}")):
        made = job("math_laptop", BF16, "algorithm.kl_beta=0.5", "actor.optim.lr=0.01", *inputs, warm_start=0)
        made.step(1, half_right)
        assert made.metrics["train/actor/kl_ref"] == pytest.approx(0, abs=1e-3)
        assert made.metrics["train/actor/grad_norm"] > 0
        made.step(2, half_right)
        assert made.metrics["train/actor/kl_ref"] > 1e-3


def test_values_of_half_the_bits_resume_to_the_bit(tmp_path: Path) -> None:
    inputs = ("math_laptop_ppo", BF16)
    straight = job(*inputs)
    straight.step(1, half_right)
    straight.save(tmp_path)
    straight.step(2, half_right)
    resumed = job(*inputs)
    resumed.load(tmp_path)
    resumed.step(2, half_right)
    expected = straight.weights()
    for name, value in resumed.weights().items():
        assert torch.equal(value, expected[name]), name
    assert straight.metrics["train/critic/grad_norm"] > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_leave_their_accelerators_between_phases(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    inputs = ("math_laptop_ppo", f"actor.model.precision={precision}", "algorithm.kl_beta=0.1")
    inputs += (
        "cluster.component_placement={'actor,rollout,reward,critic,reference': {node_group: node, placement: 0}}",
    )
    offload = tuple(f"{name}.enable_offload=true" for name in ("actor", "critic", "reference"))
    plain, made = job(*inputs), job(*inputs, *offload)
    plain.step(1, half_right)
    rested: list[str] = []
    released: list[str] = []
    monkeypatch.setattr(TrainingState, "offload", lambda self: rested.append(self._component))
    monkeypatch.setattr(
        "recipes.language.workers.reference_worker.release_memory", lambda _: released.append("reference")
    )

    made.step(1, half_right)

    assert sorted(rested) == ["actor", "critic"]
    assert released == ["reference"]
    expected = plain.weights()
    for name, value in made.weights().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_the_shipped_ppo_learns_sums(seed: int) -> None:
    made = LocalJob("math_laptop_ppo", f"actor.seed={seed}")
    for step in range(1, 121):
        made.step(step)
    first, last = sum(made.rewards[:5]) / 5, sum(made.rewards[-5:]) / 5
    assert last > 0.75
    assert last - first > 0.3


def test_distillation_learns_from_the_teachers_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages are log teacher - log policy, by plain transformers, one sequence at a time."""
    made = job(
        "distill_laptop",
        *("teacher.hidden_dim=64", "teacher.warm_start.steps=20", "algorithm.normalize_advantages=false"),
    )
    learned: list[Tensor] = []
    train = LanguageLearner.train

    def recorded(self: LanguageLearner, batch: Any, targets: TokenTargets, *args: Any) -> Any:
        learned.append(targets.advantages)
        return train(self, batch, targets, *args)

    monkeypatch.setattr(LanguageLearner, "train", recorded)
    batch = made.step(1)

    assert made.teacher is not None
    frozen: Any = made.teacher._policy.causal
    plain: Any = type(frozen)(frozen.config)
    plain.load_state_dict(frozen.state_dict())
    plain.config._attn_implementation = "eager"
    expected: list[float] = []
    behaviour = batch.logprobs.split(batch.answer_lengths.tolist())
    for row, tokens in enumerate(batch.tokens.split(batch.lengths.tolist())):
        with torch.no_grad():
            logits = plain(input_ids=tokens[None]).logits[0]
        start = int(batch.prompt_lengths[row])
        for place in range(start, len(tokens)):
            likely = logits[place - 1].log_softmax(-1)[tokens[place]].item()
            expected.append(likely - behaviour[row][place - start].item())
    assert_close(learned[0], torch.tensor(expected), atol=1e-5, rtol=0)
    assert made.metrics["train/teacher_kl"] == pytest.approx(-sum(expected) / len(expected), abs=1e-5)


@pytest.mark.nightly
def test_distillation_makes_a_policy_like_its_teacher() -> None:
    made = LocalJob("distill_laptop", "runner.max_steps=100")
    divergences: list[float] = []
    for step in range(1, 101):
        made.step(step)
        divergences.append(made.metrics["train/teacher_kl"])
    assert sum(divergences[-10:]) < 0.7 * sum(divergences[:10])
    assert sum(made.rewards[-10:]) > sum(made.rewards[:10]) + 1


def test_a_teacher_with_other_tokens_is_refused(tmp_path: Path) -> None:
    other = built_tokenizer("abc")
    other.save_pretrained(str(tmp_path))
    built_model(other).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"other tokens than the actor: \d+ tokens have other ids"):
        job("distill_laptop", f"teacher.model_path={tmp_path}")
