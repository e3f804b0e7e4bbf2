"""The workers that score answers, by rules, functions and programs or with a judge model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

import torch

from recipes.language.answers.answer_batch import RolloutBatch, ScoredAnswers
from recipes.language.answers.answer_group import AnswerGroup, Rollout
from recipes.language.answers.prompt_messages import (
    ANSWERS,
    PROGRESS,
    REPORTS,
    Assignment,
    GroupReport,
    Inbox,
    JudgeReply,
    JudgeRequest,
    ScoredGroup,
    judge_key,
    verdict_key,
)
from recipes.language.answers.sequences import Score
from recipes.language.config.algorithm_config import KNOWN_ADVANTAGES
from recipes.language.config.language_config import LanguageConfig
from recipes.language.loop.group_accounts import progress_ends
from recipes.language.loop.worker_groups import LanguageLayout
from recipes.language.rewards.judge import Judge, ask_judges, make_scorer
from recipes.language.rewards.right_answers import check_right_answers
from recipes.language.rewards.scoring import Item, item_of
from recipes.language.workers.request_tracker import EngineStream
from recipes.sections.algorithm import GROUP_ADVANTAGES
from recipes.training.comparing_worker import ComparingWorker
from rlinf_core.algorithms.advantages import varies
from rlinf_core.runners.storage.first_contact import Difference

# The minimum answers of a group whose members are compared with each other.
_LEAST_MEMBERS: Final = 2


class RewardWorker(ComparingWorker):
    """A worker that scores groups of answers and hands them to the actors.

    An answer that cannot be scored through no fault of the policy is no sample: it is counted, and left out of its
    group and of every mean. A group with too few answers left is replaced.
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
        ask = partial(ask_judges, self._answers, self._rank, layout.judges)
        self._scorer = make_scorer(self._config, lambda: ask, self._rank)
        # Start now, so that a function that cannot be loaded or called ends the run before its first step.
        self._scorer.start()
        if self._scorer.convention:
            of_whom = Difference(note=f"it is called as {self._scorer.convention}")
            self._contact.keep(f"arguments of `{reward.reward_type}`", "the kinds of reward functions", of_whom)
        self._contact.compare(
            "right answers of `data`", f"`reward_type: {reward.reward_type}`", self._check_right_answers
        )
        # Answers to train on, by slot, until they are assigned to actors.
        self._kept: dict[int, ScoredAnswers] = {}
        # Causes already logged once; metrics count all.
        self._warned: set[str] = set()

    def _check_right_answers(self) -> Difference | None:
        """Check this worker's share of the reference answers, and log those that fail.

        Raises:
            ConfigError: most reference answers fail, so data and rule do not fit.
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
            # Drop duplicates: an agent process may die after sending a group, and its task run again.
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
        """Report to the runner how many answers of an evaluation, which may take long, were scored and failed."""
        if not report.step:
            ends = progress_ends(report.failures, report.exits)
            self._scored.put((len(report.rewards) + report.failed, ends), key=PROGRESS)

    def _arrived(self, key: str) -> list[AnswerGroup]:
        """Wait for groups of answers; for a judge, which serves many at once, take all that have arrived."""
        groups: list[AnswerGroup] = self._answers.get(key=key)
        while self._config.reward.asks_judge and not self._answers.empty(key=key):
            groups = [*groups, *self._answers.get_nowait(key=key)]
        return groups

    def send_rollout_batch(self, step: int, assignment: Assignment) -> None:
        """Send the answers that this worker scored to the actors that learn from them.

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
        """Score arriving groups until None. Answers wait in a channel for their step, and reports go to the runner."""
        inbox = Inbox(self._answers, ANSWERS)
        while (groups := inbox.wait()) is not None:
            for scored, answers in self._score_groups(groups):
                if answers is not None:
                    report = scored.report
                    self._scored.put(RolloutBatch.of(*answers), weight=report.tokens, key=str(report.slot))
                self._scored.put(scored, key=REPORTS)
                self._tell_progress(scored.report)

    def _score_groups(self, groups: Sequence[AnswerGroup]) -> list[tuple[ScoredGroup, ScoredAnswers | None]]:
        """Return the reports of groups, each with its answers if they are trained on."""
        items = [[item_of(group.question, one.text, one.tokens) for one in group.unscored] for group in groups]
        with self.worker_timer("reward/score", sum(map(len, items))):
            scores = self._scores_of(items)
        return [self._with_scores(group, mine) for group, mine in zip(groups, scores, strict=True)]

    def _scores_of(self, items: Sequence[Sequence[Item]]) -> list[list[Score]]:
        """Return the scores of the answers of groups."""
        if self._config.reward.asks_judge:
            judged = iter(self._scorer.score_all([item for part in items for item in part]))
            return [list(islice(judged, len(part))) for part in items]
        # Keep groups together: a function may compare their answers.
        return [self._scorer.score_all(part) if part else [] for part in items]

    def _with_scores(self, group: AnswerGroup, judged: Sequence[Score]) -> tuple[ScoredGroup, ScoredAnswers | None]:
        """Return the report of a group, and its answers if they are trained on.

        Args:
            group: the answers.
            judged: the scores of its `unscored` answers.
        """
        trains, pairs = group.prompt.trains, list(zip(group.rollouts, self._scores(group, judged), strict=True))
        group = group.with_scores(self._with_credit(rollout, score, trains=trains) for rollout, score in pairs)
        report = self._report(group)
        answers = None
        if trains and report.kept:
            learned = [(segment, score.reward) for rollout, score in group.scored for segment in rollout.segments]
            answers = ScoredAnswers([segment for segment, _ in learned], report.slot, [reward for _, reward in learned])
        return ScoredGroup(report, group.lines() if group.prompt.shown else ()), answers

    def _scores(self, group: AnswerGroup, judged: Sequence[Score]) -> list[Score]:
        """Return the score of each answer, and log failures that no agent has logged."""
        scores = group.scores(judged, self._config.reward.incorrect_reward)
        for rollout, score in zip(group.rollouts, scores, strict=True):
            if rollout.score is None:
                self._warn(score)
        return scores

    def _report(self, group: AnswerGroup) -> GroupReport:
        """Return the report of a group, with whether it is trained on."""
        report, algorithm = group.report(), self._config.algorithm
        least = _LEAST_MEMBERS if algorithm.adv_type in GROUP_ADVANTAGES else 1
        if algorithm.adv_type not in KNOWN_ADVANTAGES:
            # A custom advantage function may rely on complete groups.
            least = group.prompt.answers
        return report._replace(
            dropped=algorithm.filter_groups and not varies(report.rewards),
            spoiled=bool(report.failures) and len(report.rewards) < least,
        )

    def _with_credit(self, rollout: Rollout, score: Score, *, trains: bool) -> Score:
        """Return the score of a rollout with its exit, the rewards of its turns, and in training the length penalty."""
        if rollout.exit:
            score = replace(score, exit=rollout.exit)
        credit = sum(sum(segment.rewards) for segment in rollout.segments)
        if credit:
            score = replace(score, reward=score.reward + credit, parts={**score.parts, "turns": credit})
        # Evaluation has no length penalty, which does not measure quality.
        return self._without_overlong(score, rollout.drawn) if trains else score

    def _warn(self, score: Score) -> None:
        """Log the first failure of each cause."""
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
        """Return a score minus the penalty of an answer near its length limit."""
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


def overlong_penalty(length: int, limit: int, margin: int) -> float:
    """Return a penalty from 0 down to -1, linear over the last `margin` tokens before the limit.

    Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13).
    """
    if length <= limit - margin:
        return 0.0
    return max(-1.0, (limit - margin - length) / margin)


class JudgeWorker(ComparingWorker):
    """A worker that judges answers for the reward workers with a frozen model."""

    config_section = "judge"

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self._config = config

    def init_worker(self, layout: LanguageLayout) -> None:
        """Load the model, and connect to the channel."""
        torch.set_num_threads(self._config.actor.threads)
        self._judge = Judge(self._config, self.torch_device, self._contact, str(self.worker_info.address))
        self._channel = self.connect_channel(layout.answers)
        self._inbox = Inbox(self._channel, judge_key(self._rank))

    def serve(self) -> None:
        """Judge answers for reward workers until the request None has arrived and all earlier ones are answered."""
        judge = self._judge
        stream = EngineStream(
            judge.engine, lambda asked: self._send(judge.submit(asked)), lambda drawn: self._send(judge.read(drawn))
        )
        stream.run(self._inbox)

    def _send(self, replies: Iterable[tuple[JudgeRequest, JudgeReply]]) -> None:
        """Send verdicts to the workers that asked, one message each."""
        by_sender: defaultdict[int, list[JudgeReply]] = defaultdict(list)
        for request, reply in replies:
            by_sender[request.sender].append(reply)
        for sender, theirs in by_sender.items():
            self._channel.put(tuple(theirs), key=verdict_key(sender))

    def _close(self) -> None:
        judge = getattr(self, "_judge", None)
        if judge is not None:
            judge.engine.stop()
