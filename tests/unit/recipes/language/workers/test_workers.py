"""Actor, critic and reference of a job, in one process, whose batches a test may change."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from recipes.language.answers.answer_batch import RolloutBatch, ScoredAnswers
from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.config import described_models
from recipes.language.config.language_config import OPTIONAL_COMPONENTS
from recipes.language.data.problem_sources import load_problems
from recipes.language.data.problems import PromptEncoder, training_order
from recipes.language.engines.registry import make_engine
from recipes.language.learning.learner import LanguageLearner
from recipes.language.learning.token_targets import TokenTargets
from recipes.language.loop.worker_groups import LanguageLayout, optional_components
from recipes.language.models.load_model import built_model, built_tokenizer, make_tokenizer, stop_token_ids
from recipes.language.weights.weight_transfer import IncomingWeights
from recipes.language.workers.actor_worker import LanguageActor
from recipes.language.workers.evaluation_workers import LanguageCritic, LanguageReference, LanguageTeacher
from recipes.language.workers.rollout_worker import LanguageRolloutWorker
from recipes.training.weights.shard_files import ShardReader
from recipes.training.weights.training_state import TrainingState
from rlinf_core import ConfigError, RLinfError
from tests.unit.recipes.language.in_threads import Hub, Post, in_thread
from tests.unit.recipes.language.tiny import job_config


class LocalJob:
    """A job whose steps are taken in this process.

    Attributes:
        rewards: mean reward of each step.
        metrics: of the last step.
        warnings: of the actor and the others.
    """

    def __init__(self, name: str, *overrides: str) -> None:
        self.config = config = job_config(*overrides, file=name)
        self.hub = Hub()
        placed = optional_components(config)
        self.warnings: list[str] = []

        def worker(kind: type[Any], section: Any) -> Any:
            made = in_thread(kind, section.group_name, self.hub, 0, 1)(config)
            made.log_warning = lambda message, *args: self.warnings.append(message % args)
            return made

        self.actor = worker(LanguageActor, config.actor)
        self.critic = worker(LanguageCritic, config.critic) if "critic" in placed else None
        self.reference = worker(LanguageReference, config.reference) if "reference" in placed else None
        self.teacher = worker(LanguageTeacher, config.teacher) if "teacher" in placed else None
        further = [int(name in placed) for name in OPTIONAL_COMPONENTS]
        layout = LanguageLayout(1, 1, 1, "answers", "scored", *further)
        self.learning = [item for item in (self.actor, self.critic) if item is not None]
        self.evaluating = [item for item in (self.critic, self.reference, self.teacher) if item is not None]
        for item in dict.fromkeys((*self.learning, *self.evaluating)):
            item.init_worker(layout)
        tokenizer = make_tokenizer(config.actor)
        self.stops = stop_token_ids(tokenizer, config.actor.model.model_path)
        self.engine = make_engine(config, tokenizer, self.stops, torch.device("cpu"))
        self.encoder = PromptEncoder(tokenizer, max_prompt_length=config.data.max_prompt_length)
        self.problems = load_problems(config.data, evaluation=False)
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}

    def step(self, step: int, change: Callable[[RolloutBatch], RolloutBatch] = lambda batch: batch) -> RolloutBatch:
        """Take a training step, and return its batch; `change` is made to it before it is learned from."""
        config = self.config
        self.actor.sync_model_to_rollout()
        inbox = self.hub.inbox(config.rollout.group_name, 0)
        IncomingWeights(lambda: cast("Any", Post(inbox))).wait().apply(self.engine)
        batch = change(self._answers(step))
        self.rewards.append(batch.rewards.mean().item())
        self.hub.inbox(config.reward.group_name, 0, config.actor.group_name, 0).put(batch)
        slots = batch.groups.unique().tolist()
        steps = config.minibatches
        self.actor.recv_rollout_batch(step, (tuple(tuple(slots[number::steps]) for number in range(steps)),))
        calls: list[Callable[[], Any]] = [lambda: self.actor.compute_advantages_and_returns(step)]
        calls += [lambda item=item: item.evaluate(step) for item in self.evaluating]
        with ThreadPoolExecutor(len(calls)) as pool:
            results = [item.result() for item in [pool.submit(call) for call in calls]]
            self.metrics = dict(results[0])
            for entry in [pool.submit(worker.run_training, step, config.runner.last_step) for worker in self.learning]:
                self.metrics |= entry.result()
        return batch

    def _answers(self, step: int) -> RolloutBatch:
        """Answer and score the prompts of a step."""
        config = self.config
        count, size = config.data.rollout_batch_size, config.algorithm.group_size
        order = training_order(len(self.problems), (step - 1) * count, count, seed=config.data.seed, shuffle=True)
        params = SamplingParams(max_new_tokens=8, seed=step, temperature=1.0)
        for slot, index in enumerate(order):
            prompt = self.encoder.encode(self.problems[index]) or ()
            self.engine.submit(Request(request_id=str(slot), prompt=prompt, params=params, group_size=size))
        answers = sorted(self.engine.results(), key=lambda item: (int(item.request_id), item.sample))
        groups: list[ScoredAnswers] = []
        for slot, index in enumerate(order):
            mine, right = answers[slot * size : (slot + 1) * size], self.problems[index].answer
            ends = [(self.encoder.text(item.tokens[:-1]), item.finish_reason) for item in mine]
            scores = [float(end == (right, "stop")) for end in ends]
            groups.append(ScoredAnswers(mine, slot, scores))
        return RolloutBatch.of_groups(groups)

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        for item in self.learning:
            item.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        for item in self.learning:
            item.load_checkpoint(str(folder))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights that are trained."""
        result: dict[str, torch.Tensor] = {}
        for name, item in zip(("actor", "critic"), self.learning, strict=False):
            state: dict[str, torch.Tensor] = dict(item._state.whole_tensors())  # pyright: ignore[reportPrivateUsage]
            result |= {f"{name}.{key}": value.clone() for key, value in state.items()}
        return result


SMALL = ("data.rollout_batch_size=4", "algorithm.group_size=4", "actor.model.hidden_dim=32", "actor.model.num_layers=1")
REFERENCE = "cluster.component_placement={'actor,rollout,reward,reference': {node_group: node, placement: 0}}"

LORA = "actor.model.lora={rank: 2}"
BF16 = "actor.model.precision=bf16"

# One optimizer step of full size in every training step.
PLAIN = ("algorithm.n_minibatches=1", "actor.optim.lr_warmup_steps=0", "actor.optim.lr_scheduler=constant")


def job(name: str = "math/sums-laptop", *overrides: str, warm_start: int = 2) -> LocalJob:
    plain = PLAIN if name == "math/sums-laptop" else ()
    return LocalJob(name, *SMALL, *plain, f"actor.warm_start.steps={warm_start}", *overrides)


def assert_same(one: LocalJob, other: LocalJob) -> None:
    expected = other.weights()
    assert [name for name, value in one.weights().items() if not torch.equal(value, expected[name])] == []


def half_right(batch: RolloutBatch) -> RolloutBatch:
    """Return a batch in which every other answer is right: so small a model knows nothing."""
    return replace(batch, rewards=torch.arange(len(batch)).remainder(2).float())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ppo_trains_a_critic_and_resumes_to_the_bit(tmp_path: Path, precision: str) -> None:
    ppo = ("math/sums-ppo-laptop", f"actor.model.precision={precision}")
    straight = job(*ppo)
    before = straight.weights()
    for step in (1, 2):
        straight.step(step, half_right)
    straight.save(tmp_path)
    after = straight.weights()
    trained = {name.split(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}
    assert trained == {"actor", "critic"}
    assert straight.metrics["train/critic/value_loss"] > 0
    assert straight.metrics["train/critic/grad_norm"] > 0
    assert "train/critic/explained_variance" in straight.metrics
    straight.step(3, half_right)
    resumed = job(*ppo)
    resumed.load(tmp_path)
    resumed.step(3, half_right)
    assert (tmp_path / "critic").is_dir()
    assert_same(resumed, straight)


@pytest.mark.parametrize(
    ("inputs", "rounding"),
    [
        ((REFERENCE,), 1e-5),
        ((REFERENCE, LORA), 1e-5),
        # Where the first pass of all is one without the adapters.
        ((BF16, LORA), 1e-3),
        ((BF16, REFERENCE), 1e-3),
        ((BF16, REFERENCE, LORA), 1e-3),
    ],
)
def test_the_policy_begins_where_its_reference_is(inputs: tuple[str, ...], rounding: float) -> None:
    made = job("math/sums-laptop", "algorithm.kl_beta=0.5", "actor.optim.lr=0.01", *inputs, warm_start=0)
    made.step(1, half_right)
    assert made.metrics["train/actor/kl_ref"] == pytest.approx(0, abs=rounding)
    assert made.metrics["train/actor/grad_norm"] > 0
    made.step(2, half_right)
    assert made.metrics["train/actor/kl_ref"] > rounding


def test_the_actor_without_its_adapters_is_a_reference() -> None:
    inputs = ("algorithm.kl_beta=0.5", LORA)
    alone = job("math/sums-laptop", *inputs, warm_start=0)
    placed = job("math/sums-laptop", *inputs, REFERENCE, warm_start=0)
    assert alone.reference is None
    for step in (1, 2, 3):
        alone.step(step, half_right)
        placed.step(step, half_right)
        results, expected = (item.metrics["train/actor/kl_ref"] for item in (alone, placed))
        assert results == pytest.approx(expected, rel=1e-4, abs=1e-7)
    fresh = job("math/sums-laptop", LORA, warm_start=0).weights()
    changed = [name for name, value in alone.weights().items() if not torch.equal(value, fresh[name])]
    assert all(".lora_" in name for name in changed)


def test_a_divergence_in_the_reward_lowers_the_advantages() -> None:
    inputs = ("algorithm.kl_beta=0.5", "algorithm.options.kl_in_reward=true", "algorithm.adv_type=reinforce_pp")
    made = job("math/sums-laptop", *inputs, REFERENCE)
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
        ("algorithm.options.tis_cap=2", "algorithm.recompute_logprobs=true", "algorithm.update_epoch=2"),
    ],
)
def test_algorithms_by_name(setting: tuple[str, ...]) -> None:
    made = job("math/sums-laptop", *setting)
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
        made = job("math/sums-laptop", *inputs, f"rollout.check_logprobs={check}")
        made.step(1, _another_engine)
        assert made.metrics["train/logprob_gap/mean"] == pytest.approx(0.3, abs=1e-4)
        assert len(made.warnings) == warned
        made.step(2, _older_weights)
        assert "train/logprob_gap/mean" not in made.metrics
        assert len(made.warnings) == warned
    strict = job("math/sums-laptop", *inputs, "rollout.check_logprobs=strict")
    strict.step(1, half_right)
    with pytest.raises(RLinfError, match=r"differ by up to 0\.3, more than 0\.01"):
        strict.step(2, _another_engine)


def test_memory_is_bought_with_time_and_gives_the_same() -> None:
    inputs = (
        (),
        ("actor.fsdp_config={gradient_checkpointing: true}",),
        ("actor.max_tokens_per_micro_batch=40",),
        ("actor.micro_batch_size=3",),
    )
    weights: list[dict[str, Tensor]] = []
    for settings in inputs:
        made = job("math/sums-laptop", *settings)
        made.step(1, half_right)
        weights.append(made.weights())
    for others in weights[1:]:
        for key, value in others.items():
            torch.testing.assert_close(value, weights[0][key], atol=2e-4, rtol=1e-4)


def test_steps_smaller_than_half_the_bits_tell_add_up() -> None:
    made = job("math/sums-laptop", BF16, "actor.optim.lr=1e-6")
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


@pytest.mark.parametrize("setting", [(), (LORA,)])
def test_half_precision_is_for_engines_not_for_checkpoints(tmp_path: Path, setting: tuple[str, ...]) -> None:
    from safetensors.torch import load_file

    straight = job("math/sums-laptop", BF16, *setting)
    for step in (1, 2):
        straight.step(step, half_right)
        if step == 1:
            straight.save(tmp_path)
    resumed = job("math/sums-laptop", BF16, *setting)
    resumed.load(tmp_path)
    resumed.step(2, half_right)
    assert_same(resumed, straight)
    stored = ShardReader(tmp_path / "actor").tensors
    weights = {name for name in stored if name.startswith("model.")}
    assert {".lora_" in name for name in weights} == {LORA in setting}
    assert {item.properties.dtype for name, item in stored.items() if name != "version"} == {torch.float32}
    expected = straight.weights()
    sent = straight.actor._state.sent_weights()  # pyright: ignore[reportPrivateUsage]
    for places, piece in zip(sent.pieces, sent.tensors(), strict=True):
        assert piece.dtype == torch.bfloat16
        for place in places:
            assert torch.equal(place.of(piece), expected[f"actor.{place.name}"].bfloat16()), place.name
    straight.actor.save_model(str(tmp_path / "model"))
    assert {item.dtype for item in load_file(tmp_path / "model" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_leave_their_accelerators_between_phases(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    inputs = ("math/sums-ppo-laptop", f"actor.model.precision={precision}", "algorithm.kl_beta=0.1")
    inputs += (REFERENCE.replace("reward,", "reward,critic,"),)
    offload = tuple(f"{name}.enable_offload=true" for name in ("actor", "critic", "reference"))
    plain, made = job(*inputs), job(*inputs, *offload)
    plain.step(1, half_right)
    rested: list[str] = []
    module = "recipes.language.workers.evaluation_workers"
    monkeypatch.setattr(TrainingState, "offload", lambda self: rested.append(self._component))
    monkeypatch.setattr(f"{module}.release_memory", lambda _: rested.append("reference"))
    made.step(1, half_right)
    assert sorted(rested) == ["actor", "critic", "reference"]
    assert_same(made, plain)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_the_shipped_ppo_learns_sums(seed: int) -> None:
    made = LocalJob("math/sums-ppo-laptop", f"actor.seed={seed}")
    for step in range(1, 121):
        made.step(step)
    first, last = sum(made.rewards[:5]) / 5, sum(made.rewards[-5:]) / 5
    assert last > 0.75
    assert last - first > 0.3


def test_distillation_learns_from_the_teachers_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advantages are log teacher - log policy, by plain transformers, one sequence at a time."""
    monkeypatch.setattr(described_models, "TEACHER_STEPS", 20)
    narrow = ("teacher.hidden_dim=64", "algorithm.options.normalize_advantages=false")
    made = job("math/sums-distill-laptop", *narrow)
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
    made = LocalJob("math/sums-distill-laptop", "runner.max_steps=100")
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
        job("math/sums-distill-laptop", f"teacher.model_path={tmp_path}")


@pytest.mark.parametrize(("actors", "rollouts", "expected"), [(1, 1, True), (2, 2, True), (1, 2, False), (2, 3, False)])
def test_weights_are_kept_where_nobody_else_receives_them(
    monkeypatch: pytest.MonkeyPatch, actors: int, rollouts: int, expected: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(IncomingWeights, "__init__", lambda self, receive, *, may_keep: asked.append(may_keep))
    config = job_config()
    worker = in_thread(LanguageRolloutWorker, config.rollout.group_name, Hub(), 0, rollouts)(config)
    worker.init_worker(LanguageLayout(actors, rollouts, 1, "answers", "scored", 0, 0))
    worker._receive()
    assert asked == [expected]
