"""The comparison, at the start of a run, of demonstrations' pictures with those of the environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.orientation import OrientationMatch, PicturesShown, Thumbnails, compared_orientations
from recipes.training.first_contact import ContactCheck, note_comparisons
from rlinf_core import RunRecord


def check_orientation(actor: Any, env: Any, record: RunRecord, environments: str) -> None:
    """Check that the pictures of demonstrations stand as the environment's, and note it in the record of the run.

    Args:
        actor: the workers that learn, which have read the demonstrations.
        env: the workers that have the environments, before their first episode.
        record: of the run.
        environments: `env.train` or `env.eval`.

    Raises:
        DatasetError: those of a camera are clearly more alike in another orientation.
    """
    if record.step:
        return  # it was compared when the run began
    shown: list[PicturesShown] = [each for by_rank in actor.first_pictures().wait() for each in by_rank or ()]
    if not shown:
        return
    seen: list[Mapping[str, Thumbnails]] = [each for each in env.first_pictures().wait() if each]
    matches = compared_orientations(shown, seen)
    notes = [_noted(each, environments) for each in matches]
    if not seen:
        unmoved = "not compared: a robot is not moved before its first episode"
        notes = [ContactCheck(f"orientation of pictures in {each.where}", environments, note=unmoved) for each in shown]
    note_comparisons(record.folder.path, notes)
    wrong = [each for each in matches if each.verdict == "differs"]
    if wrong:
        raise _turned_otherwise(wrong[0], [each for each in matches if each.where == wrong[0].where], len(shown))


def _noted(match: OrientationMatch, environments: str) -> ContactCheck:
    note = f"`data.flip` is `{match.flip}`; alike (correlation) by `data.flip`: {match.figures}"
    if match.verdict == "undecided":
        note = f"undecided, none is clearly the most alike: {note}"
    return ContactCheck(
        f"orientation of `{match.camera}` in {match.where}",
        f"first pictures of {environments}",
        ok=match.verdict != "differs",
        largest_difference=1 - match.likeness[match.flip],
        note=note,
    )


def _turned_otherwise(wrong: OrientationMatch, matches: Sequence[OrientationMatch], data_sets: int) -> DatasetError:
    where = "data.flip" if data_sets == 1 else "flip"
    beside = "" if data_sets == 1 else " beside the `path` of this data set in `data.train_data_paths`"
    agreeing = next((each for each in matches if each.verdict == "agrees"), None)
    remedy = f"write `{where}: {wrong.best}`{beside}"
    if agreeing is not None:
        remedy = f"convert the data set again: its camera `{agreeing.camera}` stands as the environment's does"
    return DatasetError(
        f"the pictures of camera `{wrong.camera}` do not stand as the environment's: they are turned by"
        f" `{where}: {wrong.flip}`, and `{wrong.best}` is right",
        where=wrong.where,
        why=f"correlation with the environment's first pictures by `{where}`: {wrong.figures}",
        help=remedy,
    )
