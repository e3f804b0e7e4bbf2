"""Steps of a job of recipe math whose batches a test may change: its workers, one of each, without a loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Request, SamplingParams
from recipes.language.config.group_names import LanguageLayout
from recipes.language.config.language_config import OPTIONAL_COMPONENTS
from recipes.language.data.load_problems import load_problems
from recipes.language.data.problems import training_order
from recipes.language.data.prompts import PromptEncoder
from recipes.language.engines.registry import make_engine
from recipes.language.loop.protocols import optional_components
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.weights.weight_transfer import IncomingWeights
from recipes.language.workers.actor_worker import LanguageActor
from recipes.language.workers.critic_worker import LanguageCritic
from recipes.language.workers.reference_worker import LanguageReference, LanguageTeacher
from recipes.math.config import MathConfig
from rlinf_core.job.load import load_job
from tests.unit.recipes.language.in_threads import Hub, Post, in_thread


class LocalJob:
    """A job whose steps are taken in this process.

    Attributes:
        rewards: mean reward of each step.
        metrics: of the last step.
        warnings: of the actor and the others.
    """

    def __init__(self, name: str, *overrides: str) -> None:
        job = load_job(name, overrides, environ={})
        job.raise_if_bad()
        self.config = config = cast("MathConfig", job.config)
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
        for item in (self.actor, self.critic, self.reference, self.teacher):
            if item is not None:
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
        evaluating = [item for item in (self.critic, self.reference, self.teacher) if item is not None]
        calls += [lambda item=item: item.evaluate(step) for item in evaluating]
        learning = [item for item in (self.actor, self.critic) if item is not None]
        with ThreadPoolExecutor(len(calls)) as pool:
            results = [item.result() for item in [pool.submit(call) for call in calls]]
            self.metrics = dict(results[0])
            for entry in [pool.submit(worker.run_training, step, config.runner.last_step) for worker in learning]:
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
            request = Request(request_id=str(slot), prompt=prompt, params=params, group_size=size)
            self.engine.submit(request)
        groups: dict[int, list[Any]] = defaultdict(list)
        for answer in self.engine.results():
            groups[int(answer.request_id)].append(answer)
        pieces: list[RolloutBatch] = []
        for slot, index in enumerate(order):
            answers = sorted(groups[slot], key=lambda item: item.sample)
            right = self.problems[index].answer
            texts = [self.encoder.text(answer.tokens[:-1]) for answer in answers]
            scores = [
                float(text == right and answer.finish_reason == "stop")
                for text, answer in zip(texts, answers, strict=True)
            ]
            pieces.append(RolloutBatch.of(answers, slot, scores))
        return RolloutBatch.joined(pieces)

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        for item in (self.actor, self.critic):
            if item is not None:
                item.save_checkpoint(str(folder))

    def load(self, folder: Path) -> None:
        """Read a checkpoint."""
        for item in (self.actor, self.critic):
            if item is not None:
                item.load_checkpoint(str(folder))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights that are trained."""
        result: dict[str, torch.Tensor] = {}
        for name, item in (("actor", self.actor), ("critic", self.critic)):
            if item is not None:
                state: dict[str, torch.Tensor] = dict(item._state.whole_tensors())  # pyright: ignore[reportPrivateUsage]
                result |= {f"{name}.{key}": value.clone() for key, value in state.items()}
        return result
