"""Shell scripts that start a job of verl: the Hydra file that they name, and the overrides that they give it."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from rlinf_cli.importing.shell.grammar import ScriptError
from rlinf_cli.importing.shell.script import UNKNOWN, ScriptLaunch, find_launch
from rlinf_core.config.diagnostics import Diagnostic, Diagnostics, Severity
from rlinf_core.config.reading import read
from rlinf_core.config.source import SourceText, Span
from rlinf_core.errors import ConfigError

SCRIPT_ENDINGS: Final = (".sh", ".bash")
# Modules of verl that start a job, each with the file that it reads where the command names none.
_FILE_BY_MODULE: Final = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.main_ppo_sync": "ppo_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.sft_trainer_ray": "sft_trainer_engine",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
    "verl.experimental.one_step_off_policy.main_ppo": "one_step_off_ppo_trainer",
}
# Those that do something else.
_OTHERS: Final = {
    "verl.trainer.main_generation_server": "this script generates answers with verl and trains nothing",
    "verl.trainer.main_generation": "this script generates answers with verl and trains nothing",
    "verl.trainer.main_eval": "this script scores existing answers, and trains nothing",
}
_PACKAGE: Final = "verl"


class ScriptJob(NamedTuple):
    """The file that a script gives to Hydra, and its overrides.

    Attributes:
        file: the main file.
        overrides: arguments of Hydra.
        source: the script.
    """

    file: str
    overrides: tuple[str, ...]
    source: SourceText


def is_script(file: Path) -> bool:
    """Return whether a file is a shell script: by its ending, or its first line."""
    if file.suffix in SCRIPT_ENDINGS:
        return True
    if not file.is_file():
        return False
    with file.open("rb") as start:
        return start.read(2) == b"#!"


def read_script(source: SourceText, environ: Mapping[str, str], diagnostics: Diagnostics) -> ScriptJob:
    """Return the job that a script starts. Nothing of the script is run.

    Raises:
        ConfigError: its form is not understood, it starts no job of verl, or that job's file is not here.
    """
    modules = {**_FILE_BY_MODULE, **_OTHERS}
    try:
        launch = find_launch(source.text, environ, lambda word: word in modules)
    except ScriptError as error:
        raise ConfigError(
            f"the script is not understood: {error}",
            help="give its arguments to the import: `rlinf import ppo_trainer.yaml KEY=VALUE ...`",
        ) from error
    if launch is None:
        raise ConfigError(
            "this script starts no training of verl",
            why="none of its commands runs " + ", ".join(f"`{module}`" for module in _FILE_BY_MODULE),
            help="name the script, or the YAML file, that starts the job",
        )
    if launch.module in _OTHERS:
        raise ConfigError(_OTHERS[launch.module], help="`rlinf eval` evaluates a trained run")
    return ScriptJob(_main_file(launch, source), tuple(_overrides(launch, source, diagnostics)), source)


def _overrides(launch: ScriptLaunch, source: SourceText, diagnostics: Diagnostics) -> Iterator[str]:
    if "torchrun" in launch.before:
        for option, key in (("nnodes", "trainer.nnodes"), ("nproc_per_node", "trainer.n_gpus_per_node")):
            number = _option(launch.before, option.replace("_", "-")) or _option(launch.before, option)
            if number.isdigit():
                yield f"{key}={number}"
            elif number:
                _warn(launch, source, diagnostics, f"`--{option}` of torchrun", "is not a number in the script", key)
    for word in launch.words:
        key, sign, value = word.partition("=")
        if key.startswith("--") or not sign:
            continue
        if UNKNOWN in value:
            why = "is the output of a command, and no command of the script is run"
            _warn(launch, source, diagnostics, f"`{key}`", why, key.lstrip("+"))
            value = UNKNOWN
        # The command line takes quotes off; what is not YAML without them is text, such as Hydra's `{a.\\{*\\}:{}}`.
        yield f"{key}={value if _is_yaml(value) else json.dumps(value)}"


def _warn(launch: ScriptLaunch, source: SourceText, diagnostics: Diagnostics, what: str, why: str, key: str) -> None:
    """Warn of a value that is known only when the script runs."""
    start = sum(len(line) + 1 for line in source.text.splitlines()[: launch.line - 1])
    help = f"give it to the import: `{key}=VALUE`"
    span = Span(source, start, start)
    diagnostics.add(Diagnostic("unknown-variable", Severity.WARNING, f"{what} {why}", span, (), help))


def _is_yaml(value: str) -> bool:
    quiet = Diagnostics()
    read(SourceText("", f"value: {value}\n"), quiet)
    return quiet.ok and "\n" not in value and " #" not in value


def _option(words: tuple[str, ...], name: str) -> str:
    for index, word in enumerate(words):
        if word == f"--{name}" and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return ""


def _main_file(launch: ScriptLaunch, source: SourceText) -> str:
    name = _option(launch.words, "config-name") or _FILE_BY_MODULE[launch.module]
    folder = _option(launch.words, "config-path") or "config"
    package = launch.module.rpartition(".")[0].replace(".", "/")
    relative = os.path.join(package, folder, f"{name.removesuffix('.yaml')}.yaml")
    for root in checkouts(source.name):
        file = os.path.normpath(os.path.join(root, relative))
        if os.path.isfile(file):
            return file
    raise ConfigError(
        f"the script starts `{launch.module}`, whose file `{os.path.normpath(relative)}` is not here",
        why="it is searched above the script's folder, and in the package `verl` of this Python",
        help="import the script where it is in a checkout of verl, or copy it there",
    )


def checkouts(name: str) -> Iterator[str]:
    """Yield the folders that may hold the package of verl: those above a file, and that of the installed package."""
    here = os.path.dirname(os.path.abspath(name))
    while True:
        yield here
        above = os.path.dirname(here)
        if above == here:
            break
        here = above
    spec = importlib.util.find_spec(_PACKAGE)
    yield from (os.path.dirname(folder) for folder in (spec.submodule_search_locations or () if spec else ()))
