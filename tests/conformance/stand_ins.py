"""Small stand-ins for what imported jobs name and this machine lacks: packages, folders of models, data, robots.

Nothing of another project is needed to write them: weights are random, and rows are made on the spot.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from ruamel.yaml import YAML

from recipes.demonstrations.lerobot.set_info import Feature
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.models.vla.vision_language import built_tokenizer
from tests.unit.recipes.agent.conversation.byte_level import write_byte_level
from tests.unit.recipes.embodied.models.openvla import openvla_folder
from tests.unit.recipes.embodied.models.vla import pi_folders

# Simulators and engines: a dry run asks whether they are installed, and starts none.
PACKAGES: Final = ("libero", "mani_skill", "metaworld", "sglang", "vllm", "wandb")
# A variable of the environment that a job names.
_VARIABLE: Final = re.compile(r"\$\{env:([A-Z][A-Z0-9_]*)\}")
_STATES, _ACTIONS = 10, 3


class StandIns(NamedTuple):
    """What was written.

    Attributes:
        packages: folder that holds the packages, for `sys.path`.
        language, openvla, pi: folders of models.
        shown: demonstrations.
        rows: problems as RLinf's rows have them.
        verl_rows: problems as verl's rows have them, in Parquet.
    """

    packages: Path
    language: Path
    openvla: Path
    pi: Path
    shown: Path
    rows: Path
    verl_rows: Path


# A reward that differs between answers of a model that knows nothing.
_REWARD: Final = """
def odd(text, answer):
    return float(len(text) % 2)
"""


def write_stand_ins(folder: Path) -> StandIns:
    """Write all of them into a folder."""
    for name in PACKAGES:
        package = folder / "packages" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (folder / "packages" / "stand_in_reward.py").write_text(_REWARD)
    pi = folder / "pi"
    pi.mkdir()
    pi_folders.write_openpi(pi)
    built_tokenizer().save_pretrained(str(pi))
    openvla_folder.write(folder / "openvla")
    return StandIns(
        folder / "packages",
        write_language_model(folder / "language"),
        folder / "openvla",
        pi,
        write_demonstrations(folder / "shown"),
        write_rows(folder / "rows.jsonl"),
        write_verl_rows(folder / "rows.parquet"),
    )


def write_language_model(folder: Path) -> Path:
    """Write a small model with a tokenizer of bytes and a chat template beside it; return its folder."""
    write_byte_level(folder)
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "model" / file.name)
    return folder / "model"


def write_demonstrations(folder: Path) -> Path:
    """Write two episodes of an arm with a camera, as lerobot's sets are; return their folder."""
    features = {
        "observation.state": Feature("float32", (_STATES,)),
        "observation.images.main": Feature("image", (32, 32, 3)),
        "action": Feature("float32", (_ACTIONS,)),
    }
    random = np.random.default_rng(0)
    with DatasetWriter(folder, 20, features) as writer:
        for length in (12, 9):
            states = random.normal(size=(length, _STATES)).astype(np.float32)
            columns = {
                "observation.state": states,
                "observation.images.main": random.integers(0, 255, (length, 32, 32, 3), np.uint8),
                "action": np.tanh(states[:, :_ACTIONS]),
            }
            writer.add(columns, "pick it up")
    return folder


def problems(count: int = 64) -> list[tuple[str, str]]:
    """Return sums in words, each with its answer."""
    pairs = [(left, right) for left in range(10) for right in range(10)][:count]
    return [
        (f"Tom has {left} apples and finds {right} more. How many has he?", str(left + right)) for left, right in pairs
    ]


def write_rows(file: Path) -> Path:
    """Write problems with `prompt` and a list of `solutions`, one a line."""
    rows = [{"prompt": question, "solutions": [answer], "answer": answer} for question, answer in problems()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_verl_rows(file: Path) -> Path:
    """Write problems as verl prepares GSM8K: a chat as prompt, the answer below `reward_model`, and both in a chat."""
    import pyarrow
    from pyarrow import parquet

    rows = [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (question, answer) in enumerate(problems())
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def overrides(text: str, made: StandIns, *, rows: Path | None = None) -> list[str]:
    """Return overrides that put stand-ins in the place of the folders and files that a job names.

    Args:
        text: the imported job.
        made: the stand-ins.
        rows: problems or conversations for a language model; by default those of RLinf.
    """
    job: dict[str, Any] = YAML(typ="safe").load(text)
    model: dict[str, Any] = job["actor"]["model"]
    data: dict[str, Any] = job.get("data", {})
    if job["recipe"] in ("math", "agent") or "messages_key" in data:
        places = {"actor.tokenizer.tokenizer_model": made.language} if "tokenizer" in job["actor"] else {}
        files = {f"data.{key}": rows or made.rows for key in ("train_data_paths", "val_data_paths") if data.get(key)}
        return [f"{key}={value}" for key, value in {"actor.model.model_path": made.language, **places, **files}.items()]
    folders = {"openvla": made.openvla, "openvla_oft": made.openvla, "pi0": made.pi, "pi05": made.pi}
    places = {"actor.model.model_path": folders.get(str(model.get("model_type")))} if model.get("model_path") else {}
    files = {"data.train_data_paths": made.shown} if data.get("train_data_paths") else {}
    return [f"{key}={value}" for key, value in {**places, **files}.items() if value]


def variables(text: str) -> dict[str, str]:
    """Return a value for each environment variable that a job names without a default."""
    names = sorted(set(_VARIABLE.findall(text)))
    return {name: f"172.16.0.{2 + index}" if "_IP" in name else "stand-in" for index, name in enumerate(names)}
