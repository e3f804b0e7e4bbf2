"""Training on tasks with images: greedy success on held-out tasks before and after, seconds, share of them in boxes.

    python -m benchmarks.language.bench_boxes_training [--seeds 0 1] [--steps 20] [--folder FOLDER]

FOLDER is on a disk, by default one of temporary files. It gets 88 task folders in Harbor's layout, which
`rlinf tasks check` checks, and for each seed a small model that has seen one command used for everything, and the right
one in a quarter of all cases. `rlinf train` trains it on 56 of the tasks; it is asked the other 32 before and after,
each a word and a file that it has seen with others only. Exits with 1 when a goal is missed: that after the training
the 95 % interval of the success is above what it was before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from benchmarks.table import Result, run_parts
from rlinf_core.env_vars import ADDRESS
from rlinf_core.node.attach import LOCAL

# What the instruction asks for, and the command that does it to a file.
COMMANDS: Final[Mapping[str, str]] = {
    "first": "head -n 1 {} > out",
    "last": "tail -n 1 {} > out",
    "count": "grep -c . {} > out",
    "sort": "sort -n {} > out",
}
FILES: Final = ("bako", "dime", "fuga", "gelo", "kiru", "lopa", "muse", "nido", "pavu", "rime", "sago")
FILES_EACH: Final = 2
HELD_OUT: Final = 32
# The model is shown conversations, this many at once, before it is trained.
SHOWN, SHOWN_AT_ONCE, SHOWN_LR = 300, 32, 2e-3
# Of the conversations, the share that shows the command of the word; the others show the usual one.
SHOWN_RIGHT, USUAL = 0.25, "sort"
SYMBOLS: Final = "0123456789+-*/=() .,:>_abcdefghijklmnopqrstuvwxyzY"
WORDS: Final = ("<bash>", "</bash>", "<result>", "</result>")
DONE: Final = "done"
TASK: Final[Mapping[str, str]] = {
    "task.toml": 'schema_version = "1.4"\n[task]\nname = "made/{name}"\n[environment]\nmemory_mb = 64\n'
    'storage_mb = 16\nnetwork_mode = "no-network"\n[verifier]\ntimeout_sec = 60\n',
    "instruction.md": "{word} of {file} to out\n",
    "environment/Dockerfile": "FROM rlinf/host\nWORKDIR /app\nCOPY files .\n",
    "solution/solve.sh": "cd /app && {command}\n",
    "tests/expected": "{expected}\n",
    "tests/test.sh": '[ "$(cat /app/out)" = "$(cat /tests/expected)" ] && reward=1 || reward=0\n'
    "echo $reward > /logs/verifier/reward.txt\n",
}
JOB: Final = """
recipe: agent
cluster:
  num_nodes: 1
  component_placement:
    actor,rollout,reward,agent: {{node_group: node, placement: 0}}
data: {{type: episodes, rollout_batch_size: 14, val_size: {held_out}, max_prompt_length: 192}}
agent:
  run: env_agent
  environment: {{type: harbor, options: {{path: tasks, box_folder: boxes, box_memory_mib: 2048}}}}
  max_turns: 3
  max_concurrent: 16
  tool_timeout: 30
rollout: {{sampling_params: {{temperature: 1.0, max_new_tokens: 32}}}}
algorithm: {{group_size: 8, clip_ratio_low: 0.2, clip_ratio_high: 0.28, n_minibatches: 2, kl_beta: 0.0}}
actor:
  model: {{model_path: model}}
  optim: {{lr: 3.0e-4, lr_warmup_steps: 2, lr_scheduler: linear}}
runner: {{seq_length: 320, max_steps: {steps}, val_check_interval: {steps}, val_before_train: true, save_interval: -1}}
"""
BOX_PARTS: Final = ("start", "commands", "tests")


def write_tasks(folder: Path) -> None:
    """Write the tasks, whose order in the folder is a random one: the first ones are held out."""
    draws = random.Random(0)
    files = [f"{name}_{number}" for name, number in itertools.product(FILES, range(FILES_EACH))]
    lines = {name: [str(draws.randrange(1000)) for _ in range(draws.randrange(3, 10))] for name in files}
    tasks = list(itertools.product(COMMANDS, files))
    draws.shuffle(tasks)
    for number, (word, file) in enumerate(tasks):
        numbers = lines[file]
        answers = {
            "first": numbers[0],
            "last": numbers[-1],
            "count": str(len(numbers)),
            "sort": "\n".join(sorted(numbers, key=int)),
        }
        filled = {"name": f"{word}-{file}", "word": word, "file": file, "expected": answers[word]}
        texts = {name: text.format(command=COMMANDS[word].format(file), **filled) for name, text in TASK.items()}
        texts |= {f"environment/files/{name}": "\n".join(content) + "\n" for name, content in lines.items()}
        for name, text in texts.items():
            path = folder / f"{number:02}-{word}-{file}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def rlinf(folder: Path, *words: str) -> None:
    """Run a command of `rlinf` in a folder.

    Raises:
        SystemExit: it failed.
    """
    environ = {**os.environ, ADDRESS.name: LOCAL, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "rlinf_cli", *words]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`rlinf {words[0]}` failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def write_model(folder: Path, tasks: Path, seed: int) -> None:
    """Write a model that has seen training tasks with the usual command or the right one, the result, and an end."""
    import torch

    from recipes.agent.conversation.turn_messages import ChatMessage, TurnEncoder
    from recipes.agent.harbor.harbor_agent import Bash
    from recipes.agent.harbor.task_folder import find_tasks, read_task
    from recipes.agent.tools.tool import Observation, Toolbox
    from recipes.language.answers.sequences import undrawn
    from recipes.language.learning.warm_start import warm_start
    from recipes.language.models.load_model import built_model, built_tokenizer
    from recipes.language.models.policy import LanguagePolicy

    torch.set_num_threads(1)
    tokenizer: Any = built_tokenizer(SYMBOLS, WORDS)
    model: Any = built_model(tokenizer, seed=seed)
    encoder, draws = TurnEncoder(tokenizer, apply_chat_template=False), random.Random(seed)
    # No command is run.
    tools = Toolbox([Bash(cast("Any", None), 1.0)], 1.0)
    result = ChatMessage("tool", tools.written(Observation("", "", 0.0)))
    texts = [read_task(path).instruction for path in find_tasks(tasks)[HELD_OUT:]]
    shown = list[Any]()
    for _ in range(SHOWN * SHOWN_AT_ONCE):
        text = draws.choice(texts)
        prompt = encoder.encode((), [ChatMessage("user", f"{tools.instructions}\n\n{text}")])
        word, _, file, *_ = text.split()
        command = COMMANDS[word if draws.random() < SHOWN_RIGHT else USUAL].format(file)
        call = f"<bash>{command}</bash>"
        called = tuple(tokenizer.encode(call))
        seen = encoder.encode((*prompt, *called), [result])
        end = (*tokenizer.encode(DONE), tokenizer.eos_token_id)
        trained = (True,) * len(called) + (False,) * len(seen) + (True,) * len(end)
        shown.append(undrawn(prompt, (*called, *seen, *end), trained))
    warm_start(LanguagePolicy(model), shown, SHOWN_AT_ONCE, SHOWN_LR)
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trained(folder: Path, seed: int, steps: int) -> Iterable[Result]:
    """Train a model on the tasks, and yield what came of it."""
    load, began = os.getloadavg()[0], time.perf_counter()
    write_model(folder / "model", folder / "tasks", seed)
    warm = time.perf_counter() - began
    (folder / "job.yaml").write_text(JOB.format(held_out=HELD_OUT, steps=steps), encoding="utf-8")
    began = time.perf_counter()
    name = f"seed{seed}"
    named = (f"runner.logger.experiment_name={name}", "runner.logger.log_path=runs")
    rlinf(folder, "train", "job.yaml", f"actor.seed={seed}", f"data.seed={seed}", *named)
    seconds = time.perf_counter() - began
    (run,) = (folder / "runs").glob(f"{name}-2*")
    rows: list[dict[str, Any]] = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").open()]
    before, *_, after = (row for row in rows if "eval/pass@1" in row)
    first, last, low = before["eval/pass@1"], after["eval/pass@1"], after["eval/pass@1_low"]
    taken = [row for row in rows if "time/step" in row]
    rewards = " ".join(f"{row['rollout/reward']:.2f}" for row in taken)
    yield Result(
        f"Greedy success on {HELD_OUT} held-out tasks, seed {seed}",
        f"before {first:.2f}; 95 % from {low:.2f} to {after['eval/pass@1_high']:.2f}; reward of each step {rewards}",
        f"{last:.2f}",
        f"> {first:.2f}",
        low > first,
    )
    measured = f"{steps} steps of 112 boxes, evaluations and start; load {load:.1f} and {os.getloadavg()[0]:.1f}"
    measured += f"; {warm:.0f} s before for the model"
    yield Result(f"Seconds of the training, seed {seed}", measured, f"{seconds:.0f} s", "<= 1500 s", seconds <= 1500)
    in_boxes = {part: statistics.fmean(row[f"agent/box_seconds/{part}"] for row in taken) for part in BOX_PARTS}
    whole = statistics.fmean(row["agent/seconds"] for row in taken)
    parts = ", ".join(f"{part} {value:.2f} s" for part, value in in_boxes.items())
    yield Result(
        f"Share of an agent's time in boxes, seed {seed}",
        f"of {whole:.2f} s: {parts}",
        f"{100 * sum(in_boxes.values()) / whole:.0f} %",
        "",
        met=True,
    )


def checked(folder: Path) -> Iterable[Result]:
    """Check the tasks as a user does."""
    began = time.perf_counter()
    rlinf(folder, "tasks", "check", "tasks", "--boxes", "boxes", "--memory", "2048")
    seconds = time.perf_counter() - began
    count = len(COMMANDS) * len(FILES) * FILES_EACH
    yield Result("Tasks that `rlinf tasks check` finds fit", f"in {seconds:.0f} s", str(count), str(count), met=True)


def main() -> int:
    """Check the tasks, and train once for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    seeds = cast("Sequence[int]", asked.seeds)
    with tempfile.TemporaryDirectory(dir=asked.folder) as made:
        folder = Path(made)
        write_tasks(folder / "tasks")
        parts = {f"seed {seed}": partial(trained, folder, seed, asked.steps) for seed in seeds}
        return run_parts({"check": partial(checked, folder), **parts}, None)


if __name__ == "__main__":
    sys.exit(main())
