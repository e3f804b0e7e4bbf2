"""The processes of a job that the words of a command line name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlinf_core.errors import RunError
from rlinf_core.suggest import did_you_mean, quoted


def components_of(config_file: Path) -> dict[str, str]:
    """Return the group names of a run by component, from its `config.yaml`; empty if that cannot be read."""
    from rlinf_cli.why.facts import read_config

    suffix = ".group_name"
    values = read_config(config_file, [])
    return {path.removesuffix(suffix): str(value) for path, value in values.items() if path.endswith(suffix)}


def chosen_processes(names: Iterable[str], words: Sequence[str], groups: Mapping[str, str], where: str) -> list[str]:
    """Return the processes that words name, as `EnvGroup:0`, `EnvGroup` or `env:0`; all of them without words.

    Args:
        names: the processes.
        words: what is asked for.
        groups: the groups by component.
        where: the job, for errors.

    Raises:
        RunError: a word names no process.
    """
    known = list(names)
    if not words:
        return known
    chosen: dict[str, None] = {}
    for word in words:
        component, colon, ranks = word.partition(":")
        spellings = {word, f"{groups.get(component, component)}{colon}{ranks}"}
        matching = [name for name in known if any(name == one or name.startswith(f"{one}:") for one in spellings)]
        if not matching:
            help = did_you_mean(word, known) or f"its processes: {quoted(known[:20])}"
            raise RunError(f"the job has no process `{word}`", where=where, help=help)
        chosen.update(dict.fromkeys(matching))
    return list(chosen)
