"""The comparison, at the start of a run, of demonstrations' pictures with those of the environment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.orientation import OrientationMatch, PicturesShown, Thumbnails, compared_orientations
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.first_contact import FILE, SKIPPED, ContactCheck, Verdict, note_comparisons

_LOGGER: Final = logging.getLogger("rlinf")


def check_orientation(actor: Any, env: Any, record: RunRecord, environments: str, *, skips: bool = False) -> None:
    """Check that the pictures of demonstrations stand as the environment's, and note it in the record of the run.

    Args:
        actor: the workers that learn, which have read the demonstrations.
        env: the workers that have the environments, before their first episode.
        record: the record of the run.
        environments: `env.train` or `env.eval`.
        skips: compare nothing, `runner.skip_checks`, and note that.

    Raises:
        DatasetError: those of a camera are clearly more alike in another orientation.
    """
    if record.step:
        return  # it was compared when the run began
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
        raise _turned_otherwise(wrong, [match for match in matches if match.where == wrong.where], len(shown))


def _noted(match: OrientationMatch, environments: str) -> ContactCheck:
    note = f"`data.flip` is `{match.flip}`; alike (correlation) by `data.flip`: {match.figures}"
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


def _turned_otherwise(wrong: OrientationMatch, matches: Sequence[OrientationMatch], data_sets: int) -> DatasetError:
    key = "data.flip" if data_sets == 1 else "flip"
    agreeing = next((match for match in matches if match.verdict == "agrees"), None)
    if agreeing is not None:
        remedy = f"convert the data set again: its camera `{agreeing.camera}` is oriented as the environment's"
    elif data_sets == 1:
        remedy = f"write `data.flip: {wrong.best}`"
    else:
        remedy = f"write `flip: {wrong.best}` beside the `path` of this data set in `data.train_data_paths`"
    remedy += "; if the pictures are right as they are, `rlinf train --skip-checks` starts without this comparison"
    return DatasetError(
        f"the pictures of camera `{wrong.camera}` are not oriented as the environment's: `{key}` is `{wrong.flip}`, and"
        f" `{wrong.best}` matches",
        where=wrong.where,
        why=f"correlation with the environment's first pictures, by `{key}`: {wrong.figures}",
        help=remedy,
    )
