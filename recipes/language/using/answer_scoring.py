"""Evaluation of a model on problems with verifiable answers, in this process: `rlinf eval` calls `evaluate`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from recipes.language.answers.sequences import Request, sampling_params
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.problem_config import EVALUATED_AT_ONCE
from recipes.language.data.load_problems import load_problems
from recipes.language.data.problems import Problem
from recipes.language.data.prompts import PromptEncoder
from recipes.language.engines.registry import make_engine
from recipes.language.judging.judge import Ask, Judge, make_scorer
from recipes.language.loop.answer_evaluation import evaluation_metrics, progress_ends, progress_text
from recipes.language.models.load_model import make_tokenizer, stop_token_ids
from recipes.language.prompts.prompt_messages import GroupReport
from recipes.language.rewards.scoring import AnswerScorer, Item, Score
from recipes.language.using.model_exporting import computing_device, model_of, with_folder
from rlinf_core import Job
from rlinf_core.cluster.claiming import claim_here
from rlinf_core.runners.step_clock import Stopwatch
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import open_checkpoint, versions

SCHEMA: Final = "rlinf.eval_answers/1"
_TELL_SECONDS: Final = 5.0


@dataclass(slots=True)
class AskedProblem:
    """A problem with its judged answers; none where its prompt was too long."""

    problem: Problem
    skipped: bool = False
    answers: list[tuple[Answer, str, Score]] = field(default_factory=list[tuple[Answer, str, Score]])

    def report(self) -> GroupReport:
        """Return the facts about the answers."""
        scored = [(answer, score) for answer, _, score in self.answers if not score.failed]
        return GroupReport(
            slot=0,
            step=0,
            problem=0,
            source=self.problem.source,
            difficulty=self.problem.difficulty,
            tokens=sum(len(answer.prompt) + len(answer.tokens) for answer, _ in scored),
            rewards=tuple(score.reward for _, score in scored),
            lengths=tuple(len(answer.tokens) for answer, _ in scored),
            truncated=sum(answer.finish_reason == "length" for answer, _ in scored),
            failures=dict(Counter(score.failure for _, _, score in self.answers if score.failed)),
            parts={},
            oldest=0,
            version_sum=0,
            skipped=self.skipped,
            corrects=tuple(score.correct for _, score in scored),
            exits=dict(Counter(str(score.exit) for _, score in scored if score.exit)),
        )


def evaluate(
    job: Job,
    checkpoint: Path | None,
    folder: Path,
    *,
    episodes: int | None = None,
    allow_training_starts: bool = False,
    video: bool | None = None,
    emit: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Answer the problems of evaluation, score the answers, and write `eval.json` and `answers.jsonl`.

    Each problem is answered `data.val_samples` times: once greedily, more often at `rollout.sampling_params`.

    Args:
        job: the checked file.
        checkpoint: a folder `global_step_N`; None: the model that the file names.
        folder: a new folder for the results.
        episodes: the number of problems, from the first; None: all.
        allow_training_starts, video: options of policies that act.
        emit: receives progress lines.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: no weights are named, or a file, the model or the reward cannot be loaded.
        CheckpointError: the checkpoint cannot be read.
    """
    config = cast("LanguageConfig", job.config)
    watch = Stopwatch()
    with model_of(config, checkpoint) as model:
        config = config.model_copy(update={"actor": with_folder(config.actor, model)})
        problems = load_problems(config.data, evaluation=True)
        count = min(len(problems), episodes or len(problems))
        asked = _answered(config, [problems[number] for number in range(count)], emit)
    folder.mkdir(parents=True)
    samples, data, sampling = config.data.val_samples, config.data, config.rollout.sampling_params
    parts = {
        "data": {"paths": list(data.val_data_paths), "type": data.source, "problems": count, "samples": samples},
        "sampling": {**sampling.model_dump(mode="json"), "temperature": _temperature(config)},
        "reward": {"reward_type": config.reward.reward_type},
        "sets": figures_by_set([problem.report() for problem in asked], samples),
        "left_out": sum(problem.report().failed for problem in asked),
    }
    lines = [json.dumps(line, ensure_ascii=False) for line in _lines(asked)]
    durable.write_whole(folder / "answers.jsonl", "\n".join(lines) + "\n")
    return write_evaluation(SCHEMA, job, checkpoint, config.actor.model.model_path, folder, watch, parts)


def figures_by_set(asked: Sequence[GroupReport], samples: int) -> dict[str, dict[str, float]]:
    """Return the metrics of `evaluation_metrics` by data set and difficulty, `all` of them last."""
    named = [(name.removeprefix("eval/"), value) for name, value in evaluation_metrics(asked, samples).items()]
    counts = Counter(problem.source for problem in asked)
    sets: dict[str, dict[str, float]] = {}
    for name, value in named:
        place, _, figure = name.rpartition("/")
        if place.split("/")[-1] not in ("failed", "exit"):
            sets.setdefault(place or "all", {})[figure] = value
    for name, figures in sets.items():
        figures["problems"] = len(asked) if name == "all" else counts.get(name, 0)
    whole = sets.pop("all")
    whole["failed"] = whole["left_out"]
    # Parts of a data set are in the metrics of a run.
    return {name: figures for name, figures in sets.items() if "/" not in name and len(counts) > 1} | {"all": whole}


def _temperature(config: LanguageConfig) -> float:
    return 0.0 if config.data.val_samples == 1 else config.rollout.sampling_params.temperature


def _answered(config: LanguageConfig, problems: Sequence[Problem], emit: Callable[[str], None]) -> list[AskedProblem]:
    """Return problems with their judged answers."""
    tokenizer, data = make_tokenizer(config.actor), config.data
    encoder = PromptEncoder.of(tokenizer, data)
    asked = [AskedProblem(problem) for problem in problems]
    stops = stop_token_ids(tokenizer, config.actor.model.model_path)
    device = computing_device()
    if device.type != "cpu":
        claim_here()
    engine = make_engine(config, tokenizer, stops, device)
    params = sampling_params(config, _temperature(config), config.actor.seed << 32)
    judges: list[Judge] = []
    progress = _Telling(emit)

    def ask() -> Ask:
        judges.append(Judge(config, device))
        return judges[0].results

    try:
        with closing(make_scorer(config, ask)) as scorer:
            scorer.start()
            for first in range(0, len(asked), EVALUATED_AT_ONCE):
                part = asked[first : first + EVALUATED_AT_ONCE]
                for number, problem in enumerate(part):
                    prompt = encoder.encode(problem.problem)
                    problem.skipped = prompt is None
                    if prompt is not None:
                        request = Request(
                            request_id=str(number), prompt=prompt, params=params, group_size=data.val_samples
                        )
                        engine.submit(request)
                drawn: dict[int, list[Answer]] = {}
                for answer in engine.results():
                    drawn.setdefault(int(answer.request_id), []).append(answer)
                    progress.look(f"{first + len(drawn)} of {len(asked)} problems answered")
                for number, answers in drawn.items():
                    part[number].answers = _scored(part[number].problem, answers, encoder, scorer)
                    progress.look(_progress(asked, data.val_samples))
    finally:
        for started in (engine, *(judge.engine for judge in judges)):
            started.stop()
    return asked


class _Telling:
    """Lines of progress, some seconds apart."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit, self._last = emit, time.monotonic()

    def look(self, line: str) -> None:
        """Tell a line if the last one is old."""
        if time.monotonic() - self._last > _TELL_SECONDS:
            self._last = time.monotonic()
            self._emit(line)


def _progress(asked: Sequence[AskedProblem], samples: int) -> str:
    """Return `12 of 64 answers, 3 timed out`."""
    scored = sum(len(problem.answers) for problem in asked)
    ends = Counter[str]()
    for report in (problem.report() for problem in asked):
        ends.update(progress_ends(report.failures, report.exits))
    return progress_text(scored, len(asked) * samples, ends)


def _scored(
    problem: Problem, answers: Sequence[Answer], encoder: PromptEncoder, scorer: AnswerScorer
) -> list[tuple[Answer, str, Score]]:
    """Return answers to a problem with their texts and scores; one that the engine failed to give is none."""
    ordered = sorted(answers, key=lambda answer: answer.sample)
    texts = [encoder.text(answer.tokens) for answer in ordered]
    items = [
        Item(
            prompt=problem.prompt,
            text=text,
            answer=problem.answer,
            tokens=list(answer.tokens),
            row=problem.row,
            messages=problem.messages,
        )
        for answer, text in zip(ordered, texts, strict=True)
        if not answer.failed
    ]
    judged = iter(scorer.score_all(items) if items else ())
    scores = [Score(0.0, answer.failure, failure="engine") if answer.failed else next(judged) for answer in ordered]
    return list(zip(ordered, texts, scores, strict=True))


def _lines(asked: Sequence[AskedProblem]) -> list[dict[str, Any]]:
    """Return what `answers.jsonl` says of each answer."""
    return [
        {
            "problem": number,
            "sample": answer.sample,
            "source": problem.problem.source,
            "prompt": problem.problem.prompt,
            "text": text,
            "answer": problem.problem.answer,
            "correct": score.correct,
            "reward": score.reward,
            "reason": score.reason,
            "finish_reason": answer.finish_reason,
            "tokens": len(answer.tokens),
        }
        for number, problem in enumerate(asked)
        for answer, text, score in problem.answers
    ]


def write_evaluation(
    schema: str,
    job: Job,
    checkpoint: Path | None,
    model_path: str | None,
    folder: Path,
    watch: Stopwatch,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write `eval.json` into `folder`, and return its object.

    Args:
        schema: the name of the contract.
        job: the checked file.
        checkpoint: the checkpoint that was evaluated; None: the folder `model_path`.
        watch: started at the begin of the evaluation.
        parts: what was evaluated on, and the metrics.
    """
    record = {
        "schema": schema,
        "recipe": job.recipe.name if job.recipe is not None else None,
        "checkpoint": {
            "step": None if checkpoint is None else open_checkpoint(checkpoint).step,
            "model_path": None if checkpoint is not None else model_path,
        },
        **parts,
        "versions": versions(),
        "times": watch.times(),
    }
    durable.write_whole(folder / "eval.json", json.dumps(record, indent=1) + "\n")
    return record
