"""The memory of a process of a language model's job with a tiny model: run as a program, it prints its peaks by phase.

    python -m recipes.language.memory.base_program COMPONENT MODULE < CONFIG

CONFIG is the pickled file of the job. The program imports the worker's MODULE, loads the tokenizer and the problems of
the file, and does with a tiny model what the worker does, so that libraries which are loaded on the way are counted.
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from recipes.training.memory.empty_process import import_worker
from rlinf_core import ConfigError
from rlinf_core.process.process_memory import PeakMeter

if TYPE_CHECKING:
    from recipes.language.config import LanguageConfig

# Components that hold a model, and those of them that train it.
_LEARNERS = ("actor", "critic")
_ENGINES = ("rollout", "turns")


def main(component: str, module: str) -> None:
    """Print the peaks, in bytes: `start`; of a component with a model `init` and `work`, of others `init`."""
    meter = PeakMeter()
    import_worker(meter, module)
    config: LanguageConfig = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - from the process that forecasts
    with tempfile.TemporaryDirectory(prefix="rlinf-memory-") as folder:
        if component in _ENGINES:
            _generate(meter, config, folder, problems=component == "rollout")
        elif component == "reward":
            _score(meter, config)
        else:
            _learn(meter, config, folder, trains=component in _LEARNERS, values=component == "critic")
    print(json.dumps({phase: peak.rss for phase, peak in meter.peaks.items()}))


def _learn(meter: PeakMeter, config: LanguageConfig, folder: str, *, trains: bool, values: bool) -> None:
    import torch

    from recipes.language.learning.warm_start import initial_policy
    from recipes.language.models.load_model import make_tokenizer
    from recipes.language.models.packing import pack
    from recipes.language.models.policy import AnswerModel, ValueModel
    from recipes.training.dtypes import compute_dtype
    from recipes.training.optimizer import make_optimizer
    from recipes.training.sharding import parallelize
    from rlinf_core.registry import import_target

    torch.set_num_threads(1)
    cpu, actor = torch.device("cpu"), config.actor
    with meter.during("init"):
        with suppress(ConfigError):  # a folder without a tokenizer
            tokenizer = make_tokenizer(actor)
            if actor.model.model_path is None and actor.warm_start.steps:
                shown: Any = import_target(config.shown_first, "examples")
                shown(config, tokenizer)
        policy: AnswerModel = initial_policy(_tiny(config, folder), _characters(config), cpu, trains=trains)
        policy = ValueModel(policy.model) if values else policy
    with meter.during("work"):
        row = pack(_answers())
        if not trains:
            with torch.no_grad():
                policy(row)
            return
        dtype = compute_dtype(actor.model.precision)
        fsdp = actor.fsdp_config
        strategy = parallelize(policy, 0, 1, fsdp, cpu, policy.blocks, compute_dtype=dtype)
        optimizer = make_optimizer(policy, actor.optim)
        found = strategy.module(row) if values else strategy.module(row, entropy=True).logprobs
        found.sum().backward()
        strategy.clip_gradients(1.0, strategy.gradient_norm())
        optimizer.step()


def _generate(meter: PeakMeter, config: LanguageConfig, folder: str, *, problems: bool) -> None:
    from recipes.language.data.load_problems import load_problems

    kept: list[Any] = []
    with meter.during("init"):
        with suppress(ConfigError):
            from recipes.language.models.load_model import make_tokenizer

            kept.append(make_tokenizer(config.actor))
        with suppress(ConfigError):  # files of another machine
            kept += [load_problems(config.data, evaluation=each) for each in (False, True)] if problems else []
        if config.rollout.backend not in ("torch", "huggingface"):
            return
        import torch

        from recipes.language.answers.sequences import Request, SamplingParams
        from recipes.language.engines.registry import make_engine

        torch.set_num_threads(1)
        engine = make_engine(_tiny(config, folder), _characters(config), (1,), torch.device("cpu"))
    with meter.during("work"):
        engine.submit(Request(request_id="", prompt=(3, 4, 5), params=SamplingParams(max_new_tokens=4)))
        while engine.unfinished:
            engine.step()


def _score(meter: PeakMeter, config: LanguageConfig) -> None:
    from recipes.language.answers.answer_batch import RolloutBatch
    from recipes.language.rewards.scoring import Scorer

    with meter.during("init"):
        Scorer(config.reward.reward_type)
        RolloutBatch.joined([_answers()])


def _tiny(config: LanguageConfig, folder: str) -> LanguageConfig:
    """Return the file with a tiny model, loaded from a folder where that of the file is."""
    from recipes.language.models.load_model import built_model

    model, start = config.actor.model, config.actor.warm_start
    changed: dict[str, Any] = {"hidden_dim": 32, "num_layers": 1}
    if model.model_path is not None:
        built_model(_characters(config), hidden_dim=32, layers=1).save_pretrained(folder)
        changed["model_path"] = folder
    few = start.model_copy(update={"steps": 0})
    actor = config.actor.model_copy(update={"model": model.model_copy(update=changed), "warm_start": few})
    return config.model_copy(update={"actor": actor})


def _characters(config: LanguageConfig) -> Any:
    from recipes.language.models.load_model import built_tokenizer

    return built_tokenizer(config.actor.built_symbols, config.actor.built_words)


def _answers() -> Any:
    from recipes.language.answers.answer_batch import RolloutBatch
    from recipes.language.learning.warm_start import example

    return RolloutBatch.of([example((3, 4, 5), (6, 1))], 0, [0.0])


if __name__ == "__main__":
    main(*sys.argv[1:])
