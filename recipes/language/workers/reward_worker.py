"""The workers that score answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from recipes.language.answers.answer_batch import RolloutBatch, ScoredAnswers
from recipes.language.answers.answer_group import AnswerGroup, EpisodeStats
from recipes.language.answers.exits import Cause
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.algorithm_config import KNOWN_ADVANTAGES
from recipes.language.config.group_names import LanguageLayout, SampleRecord
from recipes.language.config.language_config import LanguageConfig
from recipes.language.judging.judge import JudgeClient, make_scorer
from recipes.language.loop.answer_evaluation import progress_ends
from recipes.language.loop.generation import ANSWERS, PROGRESS, REPORTS
from recipes.language.loop.order_inbox import Inbox
from recipes.language.prompts.prompt_messages import Assignment, GroupReport, ScoredGroup
from recipes.language.rewards.right_answers import check_right_answers
from recipes.language.rewards.scoring import Item, Score
from recipes.sections.algorithm import GROUP_ADVANTAGES
from recipes.training.comparing_worker import ComparingWorker
from rlinf_core.algorithms.advantages import varies
from rlinf_core.runners.storage.first_contact import Difference

# Answers of a group that can be compared with each other.
LEAST_MEMBERS: Final = 2


class RewardWorker(ComparingWorker):
    """Scores groups of answers and hands them to the actors.

    An answer that cannot be scored for no fault of its own is not a sample: it is left out of its group and of every
    mean, and counted. A group with too few answers left is replaced.
    """

    config_section = "reward"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Connect to the channels."""
        reward = self._config.reward
        self._layout = layout
        self._answers = self.connect_channel(layout.answers)
        self._scored = self.connect_channel(layout.scored)
        judges = JudgeClient(self._answers, self._rank, layout.judges)
        self._scorer = make_scorer(self._config, lambda: judges, self._rank)
        # A function that cannot be loaded or called ends the run before its first step.
        self._scorer.start()
        if self._scorer.convention:
            of_whom = Difference(note=f"it is called as {self._scorer.convention}")
            self._contact.keep(f"arguments of `{reward.reward_type}`", "the kinds of reward functions", of_whom)
        self._contact.compare(
            "right answers of `data`", f"`reward_type: {reward.reward_type}`", self._check_right_answers
        )
        # Answers that actors are to learn from, by slot, until it is known which of them learns.
        self._kept: dict[int, ScoredAnswers] = {}
        # Kinds of failures already logged; the metrics count all failures.
        self._warned: set[str] = set()

    def _check_right_answers(self) -> Difference | None:
        """Hold this worker's share of the right answers against themselves, and log those that are never right.

        Raises:
            ConfigError: most are not: data and rule do not belong together.
        """
        config = self._config
        result = check_right_answers(
            config.data,
            config.reward.reward_type,
            self._scorer,
            share=(self._rank, self._layout.rewards),
            must_fit=config.rewards_by_rule,
        )
        if result is not None and not result.agrees:
            self.log_warning("%s", result.note)
        return result

    def score(self, slots: tuple[int, ...]) -> list[ScoredGroup]:
        """Score this worker's share of groups, and keep those that are trained on for `send_rollout_batch`.

        Args:
            slots: the slots of the groups of all workers.
        """
        missing = {slot for slot in slots if slot % self._layout.rewards == self._rank}
        scored_groups: list[ScoredGroup] = []
        while missing:
            # A duplicate, if an agent process died after sending it and its task was reassigned, is not missing.
            groups = [group for group in self._arrived(str(self._rank)) if group.prompt.slot in missing]
            groups = list({group.prompt.slot: group for group in groups}.values())
            missing -= {group.prompt.slot for group in groups}
            for scored, answers in self._score_groups(groups):
                if answers is not None:
                    self._kept[scored.report.slot] = answers
                scored_groups.append(scored)
                self._tell_progress(scored.report)
        return scored_groups

    def _tell_progress(self, report: GroupReport) -> None:
        """Tell the runner of an evaluation, which may take long, how many answers were scored and how many failed."""
        if not report.step:
            ends = progress_ends(report.failures, report.exits)
            self._scored.put((len(report.rewards) + report.failed, ends), key=PROGRESS)

    def _arrived(self, key: str) -> list[AnswerGroup]:
        """Wait for groups of answers; for a judge, which serves many at a time, take all that have arrived."""
        groups: list[AnswerGroup] = self._answers.get(key=key)
        while self._config.reward.asks_judge and not self._answers.empty(key=key):
            groups = [*groups, *self._answers.get_nowait(key=key)]
        return groups

    def send_rollout_batch(self, step: int, assignment: Assignment) -> None:
        """Send the answers that this worker has scored to the actors that learn from them.

        Args:
            step: the training step.
            assignment: the assignment of the groups of all reward workers.
        """
        for rank, parts in enumerate(assignment):
            mine = sorted(slot for part in parts for slot in part if slot % self._layout.rewards == self._rank)
            groups = [self._kept.pop(slot) for slot in mine]
            if groups:
                self.send(RolloutBatch.of_groups(groups), self._config.actor.group_name, rank)

    def score_forever(self) -> None:
        """Score arriving groups until None: answers go to the actors through a channel, where they wait for their step,
        and reports to the runner."""
        inbox = Inbox(self._answers, ANSWERS)
        while (groups := inbox.wait()) is not None:
            for scored, answers in self._score_groups(groups):
                if answers is not None:
                    report = scored.report
                    self._scored.put(RolloutBatch.of(*answers), weight=report.tokens, key=str(report.slot))
                self._scored.put(scored, key=REPORTS)
                self._tell_progress(scored.report)

    def _score_groups(self, groups: Sequence[AnswerGroup]) -> list[tuple[ScoredGroup, ScoredAnswers | None]]:
        """Return the reports of groups, each with its answers where they are trained on."""
        items = [self._items(group) for group in groups]
        with self.worker_timer("reward/score", sum(map(len, items))):
            scores = self._scores_of(items)
        return [self._with_scores(group, mine) for group, mine in zip(groups, scores, strict=True)]

    def _scores_of(self, items: Sequence[Sequence[Item]]) -> list[list[Score]]:
        """Return the scores of the answers of groups."""
        if self._config.reward.asks_judge:
            judged = iter(self._scorer.score_all([item for part in items for item in part]))
            return [list(islice(judged, len(part))) for part in items]
        # A function may compare the answers of a group.
        return [self._scorer.score_all(part) if part else [] for part in items]

    def _with_scores(self, group: AnswerGroup, judged: Sequence[Score]) -> tuple[ScoredGroup, ScoredAnswers | None]:
        """Return the report of a group, and its answers where they are trained on.

        Args:
            group: the answers.
            judged: scores of its `_items`.
        """
        scores = self._scores(group, judged)
        pairs = list(zip(scores, group.trajectories, strict=True))
        report = self._report(group, [(score, parts) for score, parts in pairs if not score.failed], scores)
        answers = None
        if group.prompt.trains and report.kept:
            scored = [(score.reward, answer) for score, parts in pairs if not score.failed for answer in parts]
            answers = ScoredAnswers([answer for _, answer in scored], report.slot, [reward for reward, _ in scored])
        return ScoredGroup(report, tuple(_records(group, scores)) if group.prompt.shown else ()), answers

    def _report(
        self, group: AnswerGroup, scored: Sequence[tuple[Score, list[Answer]]], scores: Sequence[Score]
    ) -> GroupReport:
        """Return the facts about a group.

        Args:
            group: the answers.
            scored: the trajectories that could be scored, with score and segments.
            scores: the scores of all trajectories.
        """
        parts: Counter[str] = Counter()
        for score, _ in scored:
            parts.update(score.parts)
        figures: Counter[str] = Counter()
        for stats, score in zip(group.episode_stats, scores, strict=False):
            if not score.failed:
                figures.update(stats.figures)
        answers = [answer for _, segments in scored for answer in segments]
        versions = [version for answer in answers for version in answer.drawn_versions]
        rewards = tuple(score.reward for score, _ in scored)
        failures = Counter(score.failure for score in scores if score.failed)
        exits = Counter(str(score.exit) for score, _ in scored if score.exit)
        algorithm = self._config.algorithm
        least = LEAST_MEMBERS if algorithm.adv_type in GROUP_ADVANTAGES else 1
        if algorithm.adv_type not in KNOWN_ADVANTAGES:
            # A user-defined advantage may count on whole groups.
            least = group.prompt.answers
        return GroupReport(
            slot=group.prompt.slot,
            step=group.prompt.step,
            problem=group.problem,
            source=group.question.source,
            difficulty=group.question.difficulty,
            tokens=sum(len(answer.prompt) + len(answer.tokens) for answer in answers),
            rewards=rewards,
            lengths=tuple(sum(answer.drawn for answer in segments) for _, segments in scored),
            truncated=sum(any(answer.finish_reason == "length" for answer in segments) for _, segments in scored),
            failures={str(cause): count for cause, count in failures.items()},
            exits=dict(exits),
            parts=dict(parts),
            oldest=min(versions, default=0),
            version_sum=sum(versions),
            skipped=not group.answers,
            dropped=algorithm.filter_groups and not varies(rewards),
            figures=dict(figures),
            corrects=tuple(score.correct for score, _ in scored),
            spoiled=bool(failures) and len(scored) < least,
            failure=next((score.reason for score in scores if score.failed), ""),
        )

    def _items(self, group: AnswerGroup) -> list[Item]:
        """Return the answers of a group to score: those that the engine gave, and the agent has not scored."""
        problem, trajectories = group.question, group.trajectories
        episode_stats = group.episode_stats or (EpisodeStats(),) * len(trajectories)
        return [
            Item(
                prompt=problem.prompt,
                text=text,
                answer=problem.answer,
                tokens=[token for answer in answers for token in answer.tokens],
                row=problem.row,
                messages=problem.messages,
            )
            for text, answers, stats in zip(group.texts, trajectories, episode_stats, strict=True)
            if stats.reward is None and _unanswered(answers) is None
        ]

    def _scores(self, group: AnswerGroup, scores: Sequence[Score]) -> list[Score]:
        """Return a score per trajectory: the one set by the agent, or that of its text, in `scores`."""
        trajectories = group.trajectories
        episode_stats = group.episode_stats or (EpisodeStats(),) * len(trajectories)
        judged = iter(scores)
        results: list[Score] = []
        for answers, stats in zip(trajectories, episode_stats, strict=True):
            unanswered = _unanswered(answers)
            if unanswered is not None:
                score = Score(self._config.reward.incorrect_reward, unanswered, failure=Cause.ENGINE)
            elif stats.reward is None:
                score = next(judged)
            else:
                right = self._config.reward.correct_reward
                correct = stats.reward >= right if stats.correct is None else stats.correct
                score = Score(stats.reward, stats.reason, stats.parts, stats.failure, correct)
            if stats.exit:
                score = replace(score, exit=stats.exit)
            credit = sum(sum(answer.rewards) for answer in answers)
            if credit:
                parts = {**score.parts, "turns": credit}
                score = replace(score, reward=score.reward + credit, parts=parts)
            # What training takes off says nothing of how good an answer is: evaluation does without.
            if group.prompt.trains:
                score = self._without_overlong(score, sum(answer.drawn for answer in answers))
            results.append(score)
        self._warn([score for score, stats in zip(results, episode_stats, strict=True) if stats.reward is None])
        return results

    def _warn(self, scores: Sequence[Score]) -> None:
        """Log the first failure of each cause."""
        for score in scores:
            if score.failure and score.failure not in self._warned:
                self._warned.add(score.failure)
                self.log_warning(
                    "an answer failed and was dropped: %s; further ones are counted as failed/%s",
                    score.reason,
                    score.failure,
                )
            elif score.exit and score.exit not in self._warned:
                self._warned.add(score.exit)
                self.log_warning(
                    "an answer counts as wrong, since it could not be scored twice and others can: %s; further ones are"
                    " counted as exit/%s",
                    score.reason,
                    score.exit,
                )

    def _without_overlong(self, score: Score, length: int) -> Score:
        """Return a score less the punishment of an answer near its limit."""
        margin = self._config.reward.overlong_margin
        if not margin:
            return score
        penalty = overlong_penalty(length, self._config.rollout.sampling_params.max_new_tokens, margin)
        if not penalty:
            return score
        parts = {**score.parts, "overlong": penalty}
        return replace(score, reward=score.reward + penalty, reason=f"{score.reason}, overlong", parts=parts)

    def _close(self) -> None:
        scorer = getattr(self, "_scorer", None)
        if scorer is not None:
            scorer.close()


def _unanswered(answers: Sequence[Answer]) -> str | None:
    """Return why the engine has not answered; None where it has."""
    return next((answer.failure for answer in answers if answer.failed), None)


def _records(group: AnswerGroup, scores: list[Score]) -> list[SampleRecord]:
    episode_stats = group.episode_stats or (EpisodeStats(),) * len(scores)
    records: list[SampleRecord] = []
    for number, (text, answers, score) in enumerate(zip(group.texts, group.trajectories, scores, strict=True)):
        # A conversation is read turn by turn; its longest segment stands for its tokens.
        answer = max(answers, key=lambda answer: len(answer.prompt) + len(answer.tokens))
        records.append(
            SampleRecord(
                slot=group.prompt.slot,
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
                turns=tuple(turn._asdict() for turn in episode_stats[number].turns),
            )
        )
    return records


def overlong_penalty(length: int, limit: int, margin: int) -> float:
    """Return a penalty from 0 down to -1, linear over the last `margin` tokens before the limit.

    Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).
    """
    if length <= limit - margin:
        return 0.0
    return max(-1.0, (limit - margin - length) / margin)
