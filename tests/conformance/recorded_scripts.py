"""The jobs that verl's example scripts start, by real bash: a `python3` on the path records what it is asked to run.

Nothing else of a script runs: the path holds the recorder, commands that do nothing, and a few that read text. Hydra
composes what was recorded, which is what `--cfg job` prints where verl is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import hydra
from omegaconf import OmegaConf

# Modules that start a job, each with the file that it reads where the command names none.
FILES: Final = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.main_ppo_sync": "ppo_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.sft_trainer_ray": "sft_trainer_engine",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
}
_RECORDER: Final = """#!/bin/sh
file=$(mktemp "$RECORDS/XXXXXX")
printf '%s\\0' "$0" "$@" > "$file"
"""
# A script may change into what it has made; nothing is made outside its home.
_MAKER: Final = """#!/bin/sh
for path; do case "$path" in "$HOME"/*) MKDIR -p "$path";; esac; done
"""
_RECORDING: Final = ("python", "python3", "torchrun", "uv")
_IDLE: Final = ("rm", "cp", "touch", "sleep", "pip", "pip3", "git", "wget", "curl", "ray", "hf", "nvidia-smi")
_READING: Final = (
    *("basename", "bash", "cat", "cut", "date", "dirname", "env", "expr", "getconf", "grep", "head", "hostname"),
    *("mktemp", "nproc", "pwd", "readlink", "realpath", "sed", "seq", "sh", "sort", "tail", "tee", "tr", "wc"),
)
_SECONDS: Final = 20
# Processes of a node, and where the model is saved.
_ARGUMENTS: Final = ("8", "saved")


class Launch(NamedTuple):
    """The command that starts a job: its module, the words behind it, and those before."""

    module: str
    words: list[str]
    before: list[str]


def recorded(script: Path, checkout: Path, folder: Path) -> Launch | None:
    """Run a script in `folder`, over links to its checkout; return the first job that it starts, None without one.

    One that starts none is run again with the arguments that scripts of one node ask for.
    """
    records, commands, here = (folder / name for name in ("records", "commands", "checkout"))
    for path in (records, commands, here):
        path.mkdir()
    for entry in checkout.iterdir():
        (here / entry.name).symlink_to(entry)
    for name, text in [*((name, _RECORDER) for name in _RECORDING), *((name, "#!/bin/sh\n") for name in _IDLE)]:
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    maker = commands / "mkdir"
    maker.write_text(_MAKER.replace("MKDIR", shutil.which("mkdir") or "false"))
    maker.chmod(0o755)
    for name in _READING:
        if (path := shutil.which(name)) is not None:
            (commands / name).symlink_to(path)
    for arguments in ((), _ARGUMENTS):
        subprocess.run(
            ["bash", str(here / script.relative_to(checkout)), *arguments],
            cwd=here,
            env={"PATH": str(commands), "HOME": str(folder), "RECORDS": str(records)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
        if (launch := next(_launches(records), None)) is not None:
            return launch
    return None


def _launches(records: Path) -> Iterator[Launch]:
    """Yield the recorded commands that start a job, in their order."""
    for record in sorted(records.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        words = record.read_text().split("\0")[:-1]
        at = next((index for index, word in enumerate(words) if word in FILES), None)
        if at is not None:
            yield Launch(words[at], words[at + 1 :], words[:at])


def job_of(launch: Launch, checkout: Path) -> str:
    """Return the file that `--cfg job` prints for a command."""
    package = checkout.joinpath(*launch.module.split(".")[:-1])
    name = _option(launch.words, "config-name") or FILES[launch.module]
    folder = (package / (_option(launch.words, "config-path") or "config")).resolve()
    overrides = [word for word in launch.words if "=" in word and not word.startswith("--")]
    for option, key in (("nnodes", "trainer.nnodes"), ("nproc-per-node", "trainer.n_gpus_per_node")):
        number = _option(launch.before, option)
        overrides += [f"{key}={number}"] if number.isdigit() else []
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return OmegaConf.to_yaml(hydra.compose(name.removesuffix(".yaml"), overrides))


def _option(words: list[str], name: str) -> str:
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        if word.partition("=")[0].replace("_", "-") == f"--{name}":
            return word.partition("=")[2] if "=" in word else behind
    return ""
