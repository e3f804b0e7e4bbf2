"""Comparison of demonstrations with the environments at the start of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.first_comparison import (
    DataFacts,
    OrientationMatch,
    PicturesShown,
    StartFacts,
    Thumbnails,
    compared_orientations,
)
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.first_contact import FILE, SKIPPED, ContactCheck, Verdict, note_comparisons

_LOGGER: Final = logging.getLogger("rlinf")
# Data sets use 29.97 and 30 interchangeably.
_RATE_ROUNDING: Final = 0.002
# Actions within this share of the environment's range are probably in other units.
_SMALL_SHARE: Final = 0.02
_MOST_LISTED: Final = 5


def check_data_facts(actor: Any, env: Any, record: RunRecord, environments: str, *, skips: bool = False) -> None:
    """Compare instructions, cameras, rates and actions of demonstrations with the environments', and record the
    results.

    Differences are logged. The run ends if the policy acts on instructions and no instruction of the environments is in
    the demonstrations.

    Args:
        actor: the workers that learn, which have read the demonstrations.
        env: the workers that have the environments, before their first episode.
        record: the record of the run.
        environments: `env.train` or `env.eval`.
        skips: whether to compare nothing and record that, `runner.skip_checks`.

    Raises:
        DatasetError: no demonstration has an instruction of the environments.
    """
    if record.step:
        return  # compared when the run began
    data = next((facts for facts in actor.data_facts().wait() if facts is not None), None)
    if data is None:
        return
    what = f"instructions, cameras, rate and actions of {data.where}"
    if skips:
        note_comparisons(record.folder.path, [ContactCheck("actor", what, environments, "skipped", note=SKIPPED)])
        return
    seen = [facts for facts in env.env_facts().wait() if facts is not None]
    notes = [*_instructions(data, seen), *_cameras(data), *_rate(data, seen), *_actions(data)]
    checks = [
        ContactCheck("actor", f"{name} of {data.where}", environments, "agrees" if agrees else "differs", note=note)
        for name, agrees, note in notes
    ]
    note_comparisons(record.folder.path, checks)
    for check in checks:
        if check.verdict == "differs":
            _LOGGER.warning("%s and %s differ, see %s: %s", check.what, environments, FILE, check.note)
    _refuse_other_instructions(data, seen, environments)


# What was compared, whether it agrees, and details in words.
_Note = tuple[str, bool, str]


def _spoken(seen: Sequence[StartFacts]) -> list[str]:
    """Return the distinct instructions of environments; empty if none are known."""
    return list(dict.fromkeys(text for facts in seen for text in facts.instructions or ()))


def _instructions(data: DataFacts, seen: Sequence[StartFacts]) -> list[_Note]:
    spoken = _spoken(seen)
    if not spoken:
        return [("instructions", True, "not compared: the environments give none before their first episode")]
    others = [text for text in spoken if text not in data.instructions]
    if not others:
        return [("instructions", True, f"{len(spoken)} of the environments, all among those of the demonstrations")]
    note = f"the environments say {_listed(others)}; the demonstrations say {_listed(data.instructions)}"
    acts = data.reads_instructions
    return [("instructions", not acts, note if acts else f"{note}; the policy acts by none")]


def _refuse_other_instructions(data: DataFacts, seen: Sequence[StartFacts], environments: str) -> None:
    spoken = _spoken(seen)
    if not data.reads_instructions or not spoken or set(spoken) & set(data.instructions):
        return
    numbered = all(" " not in text.strip() for text in data.instructions)
    remedy = (
        "write the sentence of each task into the data set: a task's number or name is none"
        if numbered
        else "give the data set and the environments the same sentences, by the tasks of the data set or `task`"
    )
    raise DatasetError(
        f"{environments} says {_listed(spoken)}, an instruction that no demonstration has",
        where=data.where,
        why=f"those of the demonstrations are {_listed(data.instructions)}",
        help=f"{remedy}; if other instructions are meant, `rlinf train --skip-checks` starts without this comparison",
    )


def _cameras(data: DataFacts) -> list[_Note]:
    pairs = ", ".join(f"`{camera}` is `{theirs}`" for camera, theirs in data.cameras.items())
    if data.guessed:
        keys = ", ".join(f"{camera}: {data.cameras[camera]}" for camera in data.guessed)
        note = f"{pairs}, as there is no other; if that is right, write `data.cameras: {{{keys}}}`"
        return [("cameras", False, note)]
    return [("cameras", True, pairs)] if pairs else []


def _rate(data: DataFacts, seen: Sequence[StartFacts]) -> list[_Note]:
    rates = {facts.control_hz for facts in seen if facts.control_hz}
    if data.fps is None or not rates:
        return [("rate", True, "not compared: one side does not say its rate")]
    agrees = all(abs(rate - data.fps) <= _RATE_ROUNDING * data.fps for rate in rates)
    listed = ", ".join(f"{rate:g}" for rate in sorted(rates))
    return [("rate", agrees, f"{data.fps:g} rows a second; the environments take {listed} actions a second")]


def _actions(data: DataFacts) -> list[_Note]:
    if not data.actions:
        return []
    columns = [
        f"{number}: {low:.3g} to {high:.3g}, {mean:.3g} +- {spread:.3g}"
        for number, (low, high, mean, spread) in enumerate(data.actions)
    ]
    note = f"smallest to largest, mean and deviation by number: {'; '.join(columns)}"
    reach = max((max(abs(low), abs(high)) for low, high, *_ in data.actions), default=1.0)
    if reach >= _SMALL_SHARE:
        return [("actions", True, note)]
    why = f"none is beyond {reach:.3g}, a small share of -1 to 1; `action_scale` of the data set multiplies other units"
    return [("actions", False, f"{why}; {note}")]


def _listed(texts: Sequence[str]) -> str:
    ending = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return ", ".join(f"`{text}`" for text in texts[:_MOST_LISTED]) + ending


def check_orientation(actor: Any, env: Any, record: RunRecord, environments: str, *, skips: bool = False) -> None:
    """Check that the images of demonstrations have the environment's orientation, and note it in the record of the run.

    Args:
        actor: the workers that learn, which have read the demonstrations.
        env: the workers that have the environments, before their first episode.
        record: the record of the run.
        environments: `env.train` or `env.eval`.
        skips: whether to compare nothing and record that, `runner.skip_checks`.

    Raises:
        DatasetError: a camera's images are clearly more alike in another orientation.
    """
    if record.step:
        return  # checked when the run began
    shown: list[PicturesShown] = [pictures for rank in actor.first_pictures().wait() for pictures in rank or ()]
    if not shown:
        return
    places = dict.fromkeys(data_set.where for data_set in shown)

    def unseen(verdict: Verdict, note: str) -> list[ContactCheck]:
        whats = [f"orientation of pictures in {where}" for where in places]
        return [ContactCheck("actor", what, environments, verdict, note=note) for what in whats]

    if skips:
        note_comparisons(record.folder.path, unseen("skipped", SKIPPED))
        return
    seen: list[Mapping[str, Thumbnails]] = [cameras for cameras in env.first_pictures().wait() if cameras]
    matches = compared_orientations(shown, seen)
    notes = [_noted(match, environments) for match in matches]
    if not seen:
        notes = unseen("agrees", "not compared: a robot is not moved before its first episode")
    note_comparisons(record.folder.path, notes)
    unclear = [f"`{match.camera}` of {match.where}" for match in matches if match.verdict == "undecided"]
    if unclear:
        _LOGGER.warning("orientation of pictures undecided, see %s: %s", FILE, ", ".join(unclear))
    wrong = next((match for match in matches if match.verdict == "differs"), None)
    if wrong is not None:
        raise _turned_otherwise(wrong, [match for match in matches if match.where == wrong.where])


def _noted(match: OrientationMatch, environments: str) -> ContactCheck:
    note = f"`flip` is `{match.flip}`; alike (correlation) by `flip`: {match.figures}"
    if match.verdict == "undecided":
        note = f"undecided, none is clearly the most alike: {note}"
    return ContactCheck(
        "actor",
        f"orientation of `{match.camera}` in {match.where}",
        f"first pictures of {environments}",
        "differs" if match.verdict == "differs" else "agrees",
        largest_difference=1 - match.likeness[match.flip],
        note=note,
    )


def _turned_otherwise(wrong: OrientationMatch, matches: Sequence[OrientationMatch]) -> DatasetError:
    agreeing = next((match for match in matches if match.verdict == "agrees"), None)
    if agreeing is not None:
        remedy = f"convert the data set again: its camera `{agreeing.camera}` is oriented as the environment's"
    else:
        remedy = f"write `data.train_data_paths: {{path: ..., flip: {wrong.best}}}` for this data set"
    remedy += "; if the pictures are right as they are, `rlinf train --skip-checks` starts without this comparison"
    return DatasetError(
        f"the pictures of camera `{wrong.camera}` are not oriented as the environment's: `flip` is `{wrong.flip}`, and"
        f" `{wrong.best}` matches",
        where=wrong.where,
        why=f"correlation with the environment's first pictures, by `flip`: {wrong.figures}",
        help=remedy,
    )
