"""Programs of the Tinker cookbook, unmodified and offline, against `rlinf serve`.

Besides the SDK, `RLINF_TEST_TINKER` has the cookbook, whose declared requirements cannot be met by package indexes:

    V/bin/pip install torch transformers datasets chz blobfile tiktoken math-verify pylatexenc tml-renderers==0.2.1
    V/bin/pip install aiohttp cloudpickle pyrage termcolor && V/bin/pip install --no-deps tinker-cookbook==0.6.1
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from tests.integration.recipes.serve.service_command import PYTHON, Service, run_client, service
from tests.unit.recipes.agent.conversation.byte_level import write_byte_level

# The cookbook reads its tokenizer from a relative folder of this name, and knows it as one that needs no chat template.
MODEL = "Qwen/Qwen3-8B-Base"


def has_cookbook() -> bool:
    return (
        bool(PYTHON) and subprocess.run([PYTHON, "-c", "import tinker_cookbook"], capture_output=True).returncode == 0
    )


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not has_cookbook(), reason="RLINF_TEST_TINKER names no interpreter with the Tinker cookbook"),
]

Rows: TypeAlias = list[Mapping[str, Any]]


def column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def loss_falls(rows: Rows) -> bool:
    losses = column(rows, "train_mean_nll")
    return len(losses) == 3 and losses == sorted(losses, reverse=True)


def has_no_rewards(rows: Rows) -> bool:
    return column(rows, "reward/total") == [0.0, 0.0]


def answers_are_on_policy(rows: Rows) -> bool:
    """Return whether probabilities of the draws are those of the passes: the policy has learned from each batch."""
    distances = [*column(rows, "optim/kl_sample_train_v1"), *column(rows, "optim/kl_sample_train_v2")]
    return len(distances) >= 4 and all(abs(distance) <= 1e-4 for distance in distances)


def answers_are_of_earlier_weights(rows: Rows) -> bool:
    return max(column(rows, "async/staleness_max")) == 1 and answers_are_on_policy(rows)


def preferences_are_learned(rows: Rows) -> bool:
    losses, accuracies = column(rows, "dpo_loss"), column(rows, "accuracy")
    return math.isclose(losses[0], math.log(2), rel_tol=1e-6) and accuracies[0] == 0 and accuracies[-1] == 1


def teacher_is_left(rows: Rows) -> bool:
    distances = column(rows, "teacher_kl")
    return abs(distances[0]) < 1e-6 and abs(distances[-1]) > 1e-5


class Program(NamedTuple):
    """A program of the cookbook: its arguments, and what must hold of its metrics."""

    name: str
    arguments: str
    holds: Callable[[Rows], bool]


ARITHMETIC = "env=arithmetic renderer_name=role_colon groups_per_batch=4 group_size=4 eval_every=0 save_every=0"
GAMES = "renderer_name=role_colon batch_size=2 max_steps=2 eval_every=0"
PROGRAMS = {
    "sl_loop": Program("sl_loop", "batch_size=16 max_steps=3 learning_rate=1e-2 lora_rank=4", loss_falls),
    "rl_loop": Program(
        "rl_loop",
        "batch_size=2 group_size=2 max_tokens=8 max_steps=2 loss_fn=importance_sampling lora_rank=4",
        has_no_rewards,
    ),
    "synchronous": Program(
        "math_rl.train", f"{ARITHMETIC} max_steps=3 loss_fn=importance_sampling", answers_are_on_policy
    ),
    "off_policy": Program(
        "math_rl.train",
        f"{ARITHMETIC} max_steps=3 loss_fn=cispo max_steps_off_policy=1",
        answers_are_of_earlier_weights,
    ),
    "dpo": Program(
        "preference.dpo.train",
        "renderer_name=role_colon batch_size=8 max_steps=3 learning_rate=1e-2 max_length=512",
        preferences_are_learned,
    ),
    "distillation": Program(
        "distillation.on_policy_distillation",
        f"teacher_model={MODEL} groups_per_batch=2 group_size=2 max_tokens=8 max_steps=2 lora_rank=4 eval_every=0"
        " save_every=0 learning_rate=1e-3",
        teacher_is_left,
    ),
    "shorter": Program("preference.shorter.train", f"{GAMES} group_size=4 max_tokens=8", answers_are_on_policy),
    "guess_number": Program(
        "multiplayer_rl.guess_number.train", f"{GAMES} group_size=2 max_tokens=6 save_every=0", answers_are_on_policy
    ),
    "prompt_distillation": Program(
        "prompt_distillation.train",
        "file_path=lessons.jsonl renderer_name=role_colon batch_size=16 max_steps=3 max_length=256 lora_rank=4"
        " learning_rate=1e-2 eval_every=0 save_every=0",
        loss_falls,
    ),
}


def write(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_folder(folder: Path) -> None:
    """Write a small model with a tokenizer of bytes, and some rows of each data set."""
    write_byte_level(folder / "parts")
    model = folder / MODEL
    shutil.copytree(folder / "parts/model", model)
    shutil.copytree(folder / "parts/tokenizer", model, dirs_exist_ok=True)
    chats = [[("user", f"What is {n} + 1?"), ("assistant", f"It is {n + 1}.")] for n in range(64)]
    messages = [[{"role": role, "content": text} for role, text in chat] for chat in chats]
    write(folder / "HuggingFaceH4/no_robots/train.jsonl", ({"messages": chat} for chat in messages))
    write(folder / "lessons.jsonl", ({"messages": chat} for chat in messages))
    problems = [{"question": f"Add {n} and {n}.", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(32)]
    write(folder / "openai/gsm8k/main/train.jsonl", problems)
    (folder / "openai/gsm8k/README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
    )
    asked = [f"\n\nHuman: Say {n}.\n\nAssistant:" for n in range(64)]
    pairs = [{"chosen": f"{text} {n}, with pleasure.", "rejected": f"{text} no no no!"} for n, text in enumerate(asked)]
    for split in ("train", "test"):
        write(folder / f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
        write(folder / f"zwhe99/DeepMath-103K/{split}.jsonl", problems)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Service]:
    folder = tmp_path_factory.mktemp("cookbook")
    write_folder(folder)
    with service(folder, f"actor.model.model_path={folder / MODEL}", f"server.model_name={MODEL}") as started:
        yield started


def run_program(running: Service, program: Program, logs: str) -> str:
    folder = running.folder.parents[1]
    named = [f"model_name={MODEL}", f"log_path={logs}"]
    arguments = ["-m", f"tinker_cookbook.recipes.{program.name}", *program.arguments.split(), *named]
    return run_client(running, arguments, folder)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_cookbook_program_reaches_its_figures(running: Service, program: Program, tmp_path: Path) -> None:
    run_program(running, program, str(tmp_path / "logs"))
    rows = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    assert program.holds(rows), rows
    saved = (tmp_path / "logs/checkpoints.jsonl").read_text()
    assert "/sampler_weights/final" in saved


def test_cookbook_program_resumes(running: Service, tmp_path: Path) -> None:
    run_program(running, PROGRAMS["sl_loop"], str(tmp_path / "logs"))
    again = run_program(running, PROGRAMS["sl_loop"], str(tmp_path / "logs"))
    assert "Resuming from batch 4" in again
