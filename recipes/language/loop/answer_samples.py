"""Sampled answers for human readers: `samples/step_N.jsonl` in the run folder, which `rlinf samples` shows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rlinf_core import RunError
from rlinf_core.config.secrets import environment_secrets
from rlinf_core.foreign.files import make_folder
from rlinf_core.process.known_secrets import hidden, remember
from rlinf_core.runners.storage import durable

FOLDER: Final = "samples"
_TEXTS: Final = frozenset({"prompt", "text", "answer", "reason"})
_TOKENS: Final = frozenset({"tokens", "pieces", "logprobs", "versions"})


def write_samples(run_folder: Path, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write the samples of a step, aside and renamed; secret values are masked.

    Args:
        run_folder: the folder of the run.
        step: they are of.
        samples: the samples, with `prompt`, `text`, `answer` and `reason`; their `tokens`, `pieces`, `logprobs` and
            `versions`; and `turns`, each with `text`.

    Raises:
        RunError: the folder cannot be written.
    """
    remember(environment_secrets())
    folder = run_folder / FOLDER
    lines = [json.dumps(_masked(sample), ensure_ascii=False) + "\n" for sample in samples]
    try:
        make_folder(folder)
        durable.write_whole(folder / f"step_{step}.jsonl", "".join(lines))
    except OSError as error:
        raise RunError("samples cannot be written", where=str(folder), why=error.strerror or str(error)) from None


def _masked(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample without secrets; the tokens of a text that held one are left out, for they spell it."""
    masked: dict[str, Any] = {name: hidden(value) if name in _TEXTS else value for name, value in sample.items()}
    if "turns" in masked:
        masked["turns"] = [{**turn, "text": hidden(turn["text"])} for turn in masked["turns"]]
    texts = [(record.get("text"), [turn["text"] for turn in record.get("turns", ())]) for record in (masked, sample)]
    if texts[0] != texts[1]:
        masked |= dict.fromkeys(_TOKENS & masked.keys(), ())
    return masked
