"""Sources of replay buffers: steps of rollouts, recordings of earlier runs, and demonstrations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.demonstrations import Demonstrations, Ends
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import STATES, image_key
from recipes.embodied.learning.data_fit import check_fits
from recipes.embodied.learning.data_reading import (
    assumed_ends,
    check_range,
    read_data,
    tell_notes,
    weights_of_replay,
    without_rewards,
)
from recipes.embodied.learning.trajectory import RolloutChunks
from recipes.embodied.loop.protocols import INTERVENTIONS
from recipes.embodied.off_policy.buffer import ReplayBuffer
from recipes.embodied.off_policy.off_policy_rollout import NEXT
from recipes.embodied.off_policy.segments import Damage, read_segments
from recipes.embodied.off_policy.storage import ReplayError, Transitions, TransitionSpec
from recipes.training.arrays import Array

if TYPE_CHECKING:
    from collections.abc import Callable

    from recipes.embodied.config.data_config import DemonstrationsConfig

_ALL: Final = slice(None)
_LOGGER = logging.getLogger(__name__)
# Arrays [T, B, ...] of T steps of B environments; prefixes mark the observations before and after a step.
Steps = dict[str, Array]
BEFORE, _AFTER = "observations/", "next_observations/"
_ACTIONS, _REWARDS, _ENDS, _CUTS, _VALID = "actions", "rewards", "terminations", "truncations", "valid"


def transition_spec(spec: EnvSpec) -> TransitionSpec:
    """Return the columns of an environment's transitions."""
    return TransitionSpec.of(spec.observations, (spec.action_size, "float32"))


def transition_steps(chunks: RolloutChunks, learned: slice = _ALL) -> Steps:
    """Return the steps of a rollout as arrays; a step is a whole chunk, with the sum of its rewards.

    Args:
        chunks: the rollout.
        learned: the part of the policy's draw that is learned as the action.
    """
    steps = {f"{BEFORE}{name}": tensor.numpy() for name, tensor in chunks.inputs.items()}
    for name, step in chunks.steps.items():
        if name.startswith(NEXT):
            steps[f"{_AFTER}{name.removeprefix(NEXT)}"] = step.numpy()
    rewards: NDArray[np.float32] = chunks.steps[_REWARDS].numpy()
    ends, cuts, valid = _flags(chunks, _ENDS), _flags(chunks, _CUTS), _flags(chunks, _VALID)
    done = ends | cuts
    # The rest of a chunk after an episode's end was not executed, and steps after a success may be masked. Any other
    # invalid action spoils the chunk: one between valid ones, or an end whose own step is invalid.
    counts = valid | (np.cumsum(done, axis=2) - done > 0)
    spoilt = counts[:, :, :-1] & ~counts[:, :, 1:] & done[:, :, 1:] | ~counts[:, :, :-1] & valid[:, :, 1:]
    of_chunks: Steps = {
        _ACTIONS: chunks.steps[_ACTIONS][:, :, 0, learned].numpy(),
        _REWARDS: np.where(valid, rewards, 0).sum(axis=2, dtype=np.float32),
        _ENDS: np.any(ends, axis=2),
        _CUTS: np.any(cuts, axis=2),
        _VALID: valid[:, :, 0] & ~np.any(spoilt, axis=2),
    }
    if INTERVENTIONS in chunks.steps:
        of_chunks[INTERVENTIONS] = chunks.steps[INTERVENTIONS][:, :, 0].numpy()
    return steps | of_chunks


def _flags(chunks: RolloutChunks, name: str) -> NDArray[np.bool_]:
    return chunks.steps[name].numpy()


def intervened(steps: Steps) -> Steps:
    """Return the steps, valid only where a person intervened."""
    none = np.zeros_like(steps[_VALID])
    return {**steps, _VALID: steps[_VALID] & steps.get(INTERVENTIONS, none)}


def add_steps(buffer: ReplayBuffer, steps: Steps) -> int:
    """Add steps of all lanes of a buffer, one at a time; return the number of valid ones.

    Raises:
        ValueError: the number of environments differs from that of lanes.
    """
    valid = steps[_VALID]
    if valid.shape[1] != buffer.lanes:
        raise ValueError(f"got steps of {valid.shape[1]} environments, but the buffer has {buffer.lanes} lanes")
    for row in range(len(valid)):
        lanes = np.flatnonzero(valid[row])
        before, after = (_named(steps, prefix, row) for prefix in (BEFORE, _AFTER))
        step = Transitions(
            before, steps[_ACTIONS][row], steps[_REWARDS][row], steps[_ENDS][row], steps[_CUTS][row], after
        )
        buffer.add(step if len(lanes) == buffer.lanes else step.chosen(lanes), lanes)
        # The next step of the other lanes does not follow from their last one, even if it looks so.
        buffer.cut_off(np.flatnonzero(~valid[row]))
    return int(valid.sum())


def _named(steps: Mapping[str, Array], prefix: str, row: int) -> Observation:
    return {name.removeprefix(prefix): step[row] for name, step in steps.items() if name.startswith(prefix)}


def add_recording(
    buffer: ReplayBuffer, folder: Path, report: Callable[[Damage], None], interventions: ReplayBuffer | None = None
) -> int:
    """Add the steps of earlier runs; return their number. Other numbers of environments are cut or spread over lanes.

    Args:
        buffer: the buffer of all steps.
        folder: the folder of the recordings.
        report: receives a message about each record that cannot be read.
        interventions: the buffer for steps with interventions; None: no separate buffer.

    Raises:
        ReplayError: the recordings are of another environment or policy.
    """
    count = 0
    for steps in read_segments(folder, report):
        _check_recorded(steps, buffer.spec, folder)
        environments = steps[_VALID].shape[1]
        for first in range(0, environments, buffer.lanes):
            part = {name: step[:, first : first + buffer.lanes] for name, step in steps.items()}
            missing = buffer.lanes - part[_VALID].shape[1]
            if missing:
                part = {name: np.pad(values, _after(values, missing)) for name, values in part.items()}
            count += add_steps(buffer, part)
            if interventions is not None:
                add_steps(interventions, intervened(part))
        if environments != buffer.lanes:
            _cut_off(buffer, interventions)
    _cut_off(buffer, interventions)
    return count


def _check_recorded(steps: Steps, spec: TransitionSpec, folder: Path) -> None:
    """Refuse steps without a column of a buffer, or with one of another form, which might be broadcast."""
    named = {f"{prefix}{name}": column for prefix in (BEFORE, _AFTER) for name, column in spec.observations.items()}
    for name, column in {**named, _ACTIONS: spec.actions}.items():
        array = steps.get(name)
        if array is None or array.shape[2:] != column.shape or array.dtype != column.dtype:
            said = "missing" if array is None else f"{array.dtype}{list(array.shape[2:])}"
            raise ReplayError(
                f"`{name}` of recorded steps is {said}; this job's is {column.dtype}{list(column.shape)}",
                where=str(folder),
                why="another environment or policy was recorded there",
                help="name another folder as `algorithm.replay.recording_path`",
            )


def _cut_off(*buffers: ReplayBuffer | None) -> None:
    for buffer in buffers:
        if buffer is not None:
            buffer.cut_off(np.arange(buffer.lanes))


def _after(array: Array, missing: int) -> list[tuple[int, int]]:
    """Return the padding for `numpy.pad` that adds invalid environments."""
    return [(0, missing if axis == 1 else 0) for axis in range(array.ndim)]


def fitting_data(config: DemonstrationsConfig, spec: EnvSpec) -> tuple[Demonstrations, dict[str, str]]:
    """Return demonstrations that fit an environment, and their camera for each camera of the environment.

    Raises:
        DatasetError: they cannot be read, or do not fit the environment.
    """
    data = read_data(config)
    return data, check_fits(data.shape, spec, config.cameras)


def demonstrations_buffer(config: DemonstrationsConfig, spec: EnvSpec) -> ReplayBuffer:
    """Return a buffer that holds all demonstrations.

    Nothing follows a step that ends the task, solved or not. The observation after the last step of a truncated episode
    is unknown: that step is dropped, and the one before counts as truncated.

    Raises:
        DatasetError: the data cannot be read, do not fit the environment, or lack rewards or ends of episodes.
    """
    data, named = fitting_data(config, spec)
    if data.draws is not None:
        raise weights_of_replay(data)
    rewards, ends = data.rewards, data.ends
    if rewards is None or ends is None:
        raise without_rewards(data)
    check_range(data, spec)
    tell_notes(data)
    _tell_ends(data, ends)
    rows = len(data) + int((ends.terminations | ends.truncations).sum()) + 4
    buffer = ReplayBuffer(transition_spec(spec), 1, rows)
    cameras = {image_key(name): data.cameras[column] for name, column in named.items()}
    for episode in range(data.episodes):
        rows = data.rows_of(episode)
        observed: Observation = {name: camera.read(rows) for name, camera in cameras.items()}
        if spec.state_size and data.states is not None:
            observed[STATES] = data.states[rows]
        _add_episode(buffer, data, rows, observed, rewards, ends)
    return buffer


def _tell_ends(data: Demonstrations, ends: Ends) -> None:
    """Log assumptions about ends of episodes, and the number of dropped last steps."""
    for assumed in assumed_ends(data):
        _LOGGER.warning("demonstrations, %s: %s", data.where, assumed)
    cut = ends.truncations[data.bounds[1:] - 1]
    if cut.any():
        single = int((cut & (np.diff(data.bounds) == 1)).sum())
        _LOGGER.warning(
            "demonstrations, %s: left out the last steps of %d of %d episodes: they were cut off, and the observation"
            " after them is not recorded%s",
            data.where,
            int(cut.sum()),
            data.episodes,
            f"; {single} of these have no other step" if single else "",
        )


def _add_episode(
    buffer: ReplayBuffer,
    data: Demonstrations,
    rows: NDArray[np.int64],
    observed: Observation,
    rewards: NDArray[np.float32],
    ends: Ends,
) -> None:
    ended, cut = ends.terminations[rows], ends.truncations[rows]
    following = np.minimum(np.arange(1, len(rows) + 1), len(rows) - 1)
    for step in np.flatnonzero(~cut).tolist():
        after = int(following[step])
        buffer.add(
            Transitions(
                {name: values[step : step + 1] for name, values in observed.items()},
                data.actions[rows[step : step + 1]],
                rewards[rows[step : step + 1]],
                ended[step : step + 1],
                ~ended[step : step + 1] & cut[after : after + 1],
                {name: values[after : after + 1] for name, values in observed.items()},
            )
        )
