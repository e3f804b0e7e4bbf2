"""The workers that score answers."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from recipes.language.batch import RolloutBatch
from recipes.language.config import LanguageConfig
from recipes.language.layout import GroupReport, LanguageLayout, SampleRecord
from recipes.language.rewards.overlong import overlong_penalty
from recipes.language.rewards.scoring import Item, Score, Scorer
from recipes.language.rollout_worker import AnswerGroup
from rlinf_core import Worker


class ScoringReport(NamedTuple):
    """Reports of a worker's share of the groups, and some answers for people to read."""

    groups: tuple[GroupReport, ...]
    samples: tuple[SampleRecord, ...]


class RewardWorker(Worker):
    """Scores groups of answers and hands them to the actors. An answer that cannot be scored costs itself alone."""

    config_section = "reward"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Connect to the channels."""
        reward, data = self._config.reward, self._config.data
        self._layout = layout
        self._scorer = Scorer(
            reward.reward_type,
            correct=reward.correct_reward,
            incorrect=reward.incorrect_reward,
            timeout=reward.timeout,
            settings={"task": data.task, "task_config": data.task_config} if data.type == "reasoning_gym" else None,
        )
        self._answers = self.connect_channel(layout.answers)
        self._scored = self.connect_channel(layout.scored)

    def score(self, slots: tuple[int, ...], samples: int, train: bool) -> ScoringReport:
        """Score this worker's share of groups, and put those for training into the channel to the actors.

        Args:
            slots: numbers of the groups of all workers.
            samples: how many answers to return for people to read, of all workers together.
            train: whether the groups are trained on.

        Returns:
            Reports by slot.
        """
        mine = sum(slot % self._layout.rewards == self._rank for slot in slots)
        reports: list[GroupReport] = []
        shown: list[SampleRecord] = []
        for _ in range(mine):
            group: AnswerGroup = self._answers.get(key=str(self._rank))
            scores = self._scores(group)
            reports.append(_report(group, scores))
            if len(shown) * self._layout.rewards < samples:
                shown += _records(group, scores)
            if train and group.answers:
                batch = RolloutBatch.of(group.answers, group.slot, [each.reward for each in scores])
                self._scored.put(batch, weight=reports[-1].tokens, key=str(group.slot))
        return ScoringReport(tuple(sorted(reports)), tuple(shown[:samples]))

    def _scores(self, group: AnswerGroup) -> list[Score]:
        problem = group.question
        items = [
            Item(prompt=problem.prompt, text=text, answer=problem.answer, tokens=answer.tokens, row=problem.row)
            for text, answer in zip(group.texts, group.answers, strict=True)
        ]
        lengths = (len(each.tokens) for each in group.answers)
        scored = zip(self._scorer.score_all(items), lengths, strict=True)
        return [self._without_overlong(score, length) for score, length in scored]

    def _without_overlong(self, score: Score, length: int) -> Score:
        """Return a score less the punishment of an answer near its limit."""
        margin = self._config.reward.soft_overlong
        if not margin:
            return score
        penalty = overlong_penalty(length, self._config.rollout.sampling_params.max_new_tokens, margin)
        if not penalty:
            return score
        parts = {**score.parts, "overlong": penalty}
        return Score(score.reward + penalty, f"{score.reason}, overlong", parts, score.failure)

    def _close(self) -> None:
        scorer = getattr(self, "_scorer", None)
        if scorer is not None:
            scorer.close()


def _report(group: AnswerGroup, scores: list[Score]) -> GroupReport:
    parts: Counter[str] = Counter()
    for each in scores:
        parts.update(each.parts)
    versions = [version for each in group.answers for version in each.versions]
    return GroupReport(
        slot=group.slot,
        problem=group.problem,
        source=group.question.source,
        difficulty=group.question.difficulty,
        tokens=sum(len(each.prompt) + len(each.tokens) for each in group.answers),
        rewards=tuple(each.reward for each in scores),
        lengths=tuple(len(each.tokens) for each in group.answers),
        truncated=sum(each.finish_reason == "length" for each in group.answers),
        failures=dict(Counter(each.failure for each in scores if each.failure)),
        parts=dict(parts),
        oldest=min(versions, default=0),
        newest=max(versions, default=0),
        skipped=not group.answers,
    )


def _records(group: AnswerGroup, scores: list[Score]) -> list[SampleRecord]:
    return [
        SampleRecord(
            slot=group.slot,
            sample=answer.sample,
            prompt=group.question.prompt,
            text=text,
            answer=group.question.answer,
            reward=score.reward,
            reason=score.reason,
            finish_reason=answer.finish_reason,
            parts=dict(score.parts),
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            pieces=group.pieces[number] if group.pieces else (),
        )
        for number, (text, answer, score) in enumerate(zip(group.texts, group.answers, scores, strict=True))
    ]
