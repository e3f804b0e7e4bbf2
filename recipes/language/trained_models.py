"""Uses of trained language models, in this process: export of a checkpoint, and evaluation on problems with answers.

`rlinf export` calls `export_checkpoint`, and `rlinf eval` calls `evaluate`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from recipes.language.answers.answer_group import AnswerGroup, Rollout
from recipes.language.answers.prompt_messages import GroupReport, unlearned_prompts
from recipes.language.answers.sequences import Request, sampling_params
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.described_models import ModelJobConfig
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.problem_config import EVALUATED_AT_ONCE
from recipes.language.data.problem_sources import load_problems
from recipes.language.data.problems import Problem, PromptEncoder, prompt_tokens
from recipes.language.engines.registry import make_engine
from recipes.language.loop.group_accounts import (
    by_label,
    figures_of,
    progress_ends,
    progress_text,
    require_asked,
    sets_of,
    without_secrets,
)
from recipes.language.loop.model_checkpoints import MODEL, STATE
from recipes.language.models.load_model import make_model, make_tokenizer, stop_token_ids
from recipes.language.models.policy import LanguagePolicy
from recipes.language.rewards.judge import Ask, Judge, make_scorer
from recipes.language.rewards.scoring import AnswerScorer, item_of
from recipes.language.weights.model_export import export
from recipes.language.weights.written_model import check_written, expected_logprobs
from recipes.training.huggingface import with_lora
from recipes.training.typed_tensors import DTYPES
from recipes.training.weights.training_state import load_weights
from rlinf_core import CheckpointError, ConfigError, Job, RLinfError
from rlinf_core.cluster.driver_job import claim_here
from rlinf_core.runners.step_clock import Stopwatch
from rlinf_core.runners.storage import durable
from rlinf_core.runners.storage.checkpoint import open_checkpoint, versions
from rlinf_core.runners.storage.first_contact import Difference

if TYPE_CHECKING:
    from transformers import PreTrainedModel


KIND: Final = "safetensors"


def export_checkpoint(config: ModelJobConfig, checkpoint: Path, folder: Path, kind: str) -> dict[str, Any]:
    """Write the model of a checkpoint as config, safetensors and tokenizer; a LoRA adapter is merged.

    Args:
        config: the configuration of the run.
        checkpoint: a folder `global_step_N`.
        folder: a new folder.
        kind: the format; only `safetensors` is supported.

    Returns:
        See `Export`; `difference` is the largest of a log-probability between the folder's model and the policy.

    Raises:
        ConfigError: another format is asked for, or the base model does not exist.
        CheckpointError: the checkpoint cannot be read.
        RLinfError: the folder exists.
    """
    if kind != KIND:
        raise ConfigError(
            f"a language model cannot be exported as `{kind}`",
            help=f"write `--format {KIND}`: a folder of transformers, which vLLM loads, too",
        )
    if folder.exists():
        raise RLinfError("the export folder already exists", where=str(folder), help="name another with `-o`")
    difference = write_model(config, checkpoint, folder)
    return {
        "folder": str(folder),
        "format": kind,
        "files": sorted(file.name for file in folder.iterdir()),
        "inputs": {},
        "outputs": {},
        "difference": difference.largest,
    }


def write_model(config: ModelJobConfig, checkpoint: Path, folder: Path) -> Difference:
    """Write the folder, and return the largest difference between its model's log-probabilities and the policy's;
    raises as `export_checkpoint` does.
    """
    if not (checkpoint / STATE).is_dir():
        if not (checkpoint / MODEL).is_dir():
            raise CheckpointError("the checkpoint has no model", where=str(checkpoint))
        shutil.copytree(checkpoint / MODEL, folder)
        return Difference(0.0, note="copied")
    tokenizer = make_tokenizer(config.actor)
    model, lora = make_model(config.actor, tokenizer), config.actor.model.adapter()
    policy = LanguagePolicy(model if lora is None else cast("PreTrainedModel", with_lora(model, lora))).eval()
    load_weights(checkpoint, policy)
    expected, differences = expected_logprobs(policy, DTYPES[config.actor.model.precision]), list[Difference]()

    def check(aside: Path, fingerprints: Mapping[str, str]) -> None:
        differences.append(check_written(aside, fingerprints, expected))

    export(policy.state_dict().items(), config.actor, tokenizer, folder, check)
    (difference,) = differences
    return difference


@contextmanager
def model_of(config: ModelJobConfig, checkpoint: Path | None) -> Generator[str, None, None]:
    """Yield the folder with the model of a checkpoint, or without one, of the configuration.

    A folder that is created for this is deleted afterwards.

    Raises:
        ConfigError: neither a checkpoint nor a model folder is named.
        CheckpointError: the checkpoint cannot be read.
    """
    if checkpoint is None:
        named = config.actor.model.model_path
        if named is None:
            raise ConfigError(
                "no weights are named",
                where="actor.model.model_path",
                help="name a run or a checkpoint with `--checkpoint`, or a model folder with `actor.model.model_path`",
            )
        yield named
    elif (checkpoint / MODEL).is_dir():
        yield str(checkpoint / MODEL)
    else:
        with TemporaryDirectory(prefix="rlinf-model-") as made:
            write_model(config, checkpoint, Path(made) / MODEL)
            yield str(Path(made) / MODEL)


def with_folder(actor: Any, folder: str) -> Any:
    """Return a section `actor` whose model is that of a folder, without adapters."""
    model = actor.model.model_copy(update={"model_path": folder, "lora": None})
    return actor.model_copy(update={"model": model})


def computing_device() -> torch.device:
    """Return the accelerator of this process if there is one, else the CPU."""
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


SCHEMA: Final = "rlinf.eval_answers/1"
_TELL_SECONDS: Final = 5.0


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
    """Answer the evaluation problems, score the answers, and write `eval.json` and `answers.jsonl`.

    Each problem is answered `data.val_samples` times: greedily if once, else with `rollout.sampling_params`.

    Args:
        job: the validated job.
        checkpoint: a folder `global_step_N`; None: the model that the configuration names.
        folder: a new folder for the results.
        episodes: the number of problems, from the first; None: all.
        allow_training_starts, video: options of policies that act.
        emit: receives progress lines.

    Returns:
        The object of `eval.json`.

    Raises:
        ConfigError: no weights are named, or a file, the model or the reward cannot be loaded.
        CheckpointError: the checkpoint cannot be read.
        RunError: every prompt was skipped.
    """
    config = cast("LanguageConfig", job.config)
    watch, step = Stopwatch(), step_of(checkpoint)
    with model_of(config, checkpoint) as model:
        config = config.model_copy(update={"actor": with_folder(config.actor, model)})
        problems = load_problems(config.data, evaluation=True)
        count = min(len(problems), episodes or len(problems))
        asked = _answered(config, [problems[number] for number in range(count)], emit)
    reports = [group.report() for group in asked]
    require_asked(reports)
    folder.mkdir(parents=True)
    samples, data, sampling = config.data.val_samples, config.data, config.rollout.sampling_params
    parts = {
        "data": {"paths": list(data.val_data_paths), "type": data.source, "problems": count, "samples": samples},
        "sampling": {**sampling.model_dump(mode="json"), "temperature": _temperature(config)},
        "reward": {"reward_type": config.reward.reward_type},
        "sets": figures_by_set(reports, samples),
        "left_out": sum(report.failed for report in reports),
    }
    lines = [json.dumps(line, ensure_ascii=False) for line in _lines(asked)]
    durable.write_whole(folder / "answers.jsonl", "\n".join(lines) + "\n")
    return write_evaluation(SCHEMA, job, step, config.actor.model.model_path, folder, watch, parts)


def figures_by_set(asked: Sequence[GroupReport], samples: int) -> dict[str, dict[str, float]]:
    """Return the figures of each data set and difficulty label, if there are several, and of `all`, last."""

    def of(problems: Sequence[GroupReport]) -> dict[str, float]:
        # Causes of failures and exits are in the metrics of a run.
        plain = {name: value for name, value in figures_of(problems, samples).items() if "/" not in name}
        return {**plain, "problems": len(problems)}

    sets = sets_of(asked)
    if len(by_label(asked, "source")) == 1:
        del sets[next(iter(sets))]  # it equals `all`
    whole = of(asked)
    whole["failed"] = whole["left_out"]
    named = {f"{name}.jsonl" if name == "all" else name: of(part) for name, part in sets.items()}
    return {**named, "all": whole}


def _temperature(config: LanguageConfig) -> float:
    return 0.0 if config.data.val_samples == 1 else config.rollout.sampling_params.temperature


def _answered(config: LanguageConfig, problems: Sequence[Problem], emit: Callable[[str], None]) -> list[AnswerGroup]:
    """Return problems with their scored answers; none if the prompt was too long."""
    tokenizer, data = make_tokenizer(config.actor), config.data
    encoder = PromptEncoder.of(tokenizer, data)
    prompts = unlearned_prompts(0, len(problems), 1, data.val_samples, _temperature(config), 0)
    asked = [AnswerGroup(prompt, prompt.slot, problem) for prompt, problem in zip(prompts, problems, strict=True)]
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
                for number, group in enumerate(asked[first : first + EVALUATED_AT_ONCE]):
                    prompt, why = prompt_tokens(encoder, group.question, params.max_new_tokens, engine.longest)
                    if why:
                        emit(f"skipped problem {group.problem}: {why}")
                    if prompt:
                        name, size = str(number), data.val_samples
                        engine.submit(Request(request_id=name, prompt=prompt, params=params, group_size=size))
                drawn: dict[int, list[Answer]] = {}
                for answer in engine.results():
                    drawn.setdefault(int(answer.request_id), []).append(answer)
                    progress.look(f"{first + len(drawn)} of {len(asked)} problems answered")
                for number, answers in drawn.items():
                    ordered = sorted(answers, key=lambda answer: answer.sample)
                    rollouts = tuple(Rollout((answer,), encoder.text(answer.tokens, stops)) for answer in ordered)
                    group = asked[first + number]._replace(rollouts=rollouts)
                    asked[first + number] = _scored(group, scorer, config.reward.incorrect_reward)
                    progress.look(_progress(asked, data.val_samples))
    finally:
        for started in (engine, *(judge.engine for judge in judges)):
            started.stop()
    return asked


class _Telling:
    """A reporter of progress lines, some seconds apart."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit, self._last = emit, time.monotonic()

    def look(self, line: str) -> None:
        """Report a line if the last report is old."""
        if time.monotonic() - self._last > _TELL_SECONDS:
            self._last = time.monotonic()
            self._emit(line)


def _progress(asked: Sequence[AnswerGroup], samples: int) -> str:
    """Return `12 of 64 answers, 3 timed out`."""
    scored = sum(len(group.rollouts) for group in asked)
    ends = Counter[str]()
    for report in (group.report() for group in asked):
        ends.update(progress_ends(report.failures, report.exits))
    return progress_text(scored, len(asked) * samples, ends)


def _scored(group: AnswerGroup, scorer: AnswerScorer, incorrect: float) -> AnswerGroup:
    """Return a group with the scores of its answers."""
    items = [item_of(group.question, rollout.text, rollout.tokens) for rollout in group.unscored]
    return group.with_scores(group.scores(scorer.score_all(items) if items else (), incorrect))


def _lines(asked: Sequence[AnswerGroup]) -> list[dict[str, Any]]:
    """Return the lines of `answers.jsonl`, without secrets."""
    names = "sample", "source", "prompt", "text", "answer", "correct", "reward", "reason", "finish_reason", "tokens"
    shown = without_secrets(line for group in asked for line in group.lines())
    rollouts = [(group, rollout) for group in asked for rollout in group.rollouts]
    lines: list[dict[str, Any]] = []
    for (group, rollout), line in zip(rollouts, shown, strict=True):
        correct = rollout.score is not None and rollout.score.correct
        line |= {"source": group.question.source, "correct": correct, "tokens": len(rollout.tokens)}
        lines.append({"problem": group.problem, **{name: line[name] for name in names}})
    return lines


def step_of(checkpoint: Path | None) -> int | None:
    """Return the step of a checkpoint, which an active run may remove during the evaluation."""
    return None if checkpoint is None else open_checkpoint(checkpoint).step


def write_evaluation(
    schema: str,
    job: Job,
    step: int | None,
    model_path: str | None,
    folder: Path,
    watch: Stopwatch,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """Write `eval.json` into `folder`, and return its object.

    Args:
        schema: the name of the schema.
        job: the validated job.
        step: the step of the evaluated checkpoint; None: the folder `model_path` was evaluated.
        watch: the stopwatch of the evaluation.
        parts: the description of the data, and the metrics.
    """
    record = {
        "schema": schema,
        "recipe": job.recipe.name if job.recipe is not None else None,
        "checkpoint": {"step": step, "model_path": model_path if step is None else None},
        **parts,
        "versions": versions(),
        "times": watch.times(),
    }
    durable.write_whole(folder / "eval.json", json.dumps(record, indent=1) + "\n")
    return record
