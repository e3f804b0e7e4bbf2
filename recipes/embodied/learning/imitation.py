"""Learning from demonstrations: batches of observations and actions, and their loss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.demonstrations import Demonstrations
from recipes.demonstrations.first_comparison import DataFacts, PicturesShown, facts_of
from recipes.embodied.envs.env_spec import EnvSpec, Observation
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, STATES, image_key, past_key
from recipes.embodied.learning.data_fit import check_fits
from recipes.embodied.learning.data_reading import (
    check_range,
    first_pictures,
    read_data,
    tell_notes,
    without_interventions,
)
from recipes.embodied.models.normalization import Normalization, Statistics
from recipes.training.arrays import Array

if TYPE_CHECKING:
    from recipes.embodied.config.data_config import DemonstrationsConfig
    from recipes.embodied.models.base_policy import BasePolicy

# The largest shift of an image, as a share of its size, for a success classifier.
_SHIFT: Final = 1 / 16


class ImitationData:
    """Demonstrations in the form that a policy learns from.

    Args:
        config: the section `data`.
        spec: the spec of the environment; None: inferred from the data.
        chunk: C, the actions per observation.
        successes: learn whether an image shows the task solved (1) or not (0), instead of actions; both labels are
            drawn equally often, and images are shifted by a few pixels against overfitting to positions.

    Attributes:
        spec: the spec of observations and actions.
        demonstrations: the rows.

    Raises:
        DatasetError: the data cannot be read, or do not fit the environment.
    """

    def __init__(
        self, config: DemonstrationsConfig, spec: EnvSpec | None, chunk: int, *, successes: bool = False
    ) -> None:
        data = read_data(config)
        data = labelled_by_success(data) if successes else data
        spec = spec_of_pictures(data) if successes else spec
        self.spec = spec or spec_of(data)
        self._chunk = chunk
        self._scheme: Literal["none", "mean_std", "quantile"] = config.normalization
        named = check_fits(data.shape, self.spec, config.cameras)
        acts = spec is not None and not successes
        if acts:
            check_range(data, self.spec)
        self.demonstrations = data
        tell_notes(self.demonstrations)
        self._named, self._chosen = named, config.cameras
        self._cameras = {name: self.demonstrations.cameras[column] for name, column in named.items()}
        self._shifts = successes
        self._imitated = (
            balanced_rows(self.demonstrations)
            if successes
            else imitated_rows(self.demonstrations, only_interventions=config.only_interventions)
        )
        self._count = len(np.unique(self._imitated))
        # Cumulative chances of rows to be drawn, if the chances differ.
        chances = chances_of(self.demonstrations, self._imitated)
        self._drawn = None if chances is None else torch.from_numpy(np.cumsum(chances))
        # The first and the last row of each row's episode.
        bounds = self.demonstrations.bounds
        self._first, self._last = (np.repeat(ends, np.diff(bounds)) for ends in (bounds[:-1], bounds[1:] - 1))

    def __len__(self) -> int:
        """Return the number of rows that are learned from."""
        return self._count

    def first_pictures(self) -> list[PicturesShown]:
        """Return the first images of some episodes."""
        return first_pictures(self.demonstrations, self._named)

    def facts(self, *, reads_instructions: bool) -> DataFacts:
        """Return the facts that are compared with the environments before the first episode."""
        return facts_of(self.demonstrations, self._named, self._chosen, reads_instructions=reads_instructions)

    def normalization(self, policy: BasePolicy) -> Normalization:
        """Return the statistics of the rows, in the form that `data.normalization` or the policy requires."""
        data = self.demonstrations
        if self._scheme == "none":
            return Normalization()
        own = policy.normalization_of(data.states if self.spec.state_size else None, data.actions)
        if own is not None:
            return own
        states = Statistics.of(data.states) if data.states is not None and self.spec.state_size else None
        actions = Statistics.of(data.actions) if self.spec.num_choices is None else None
        return Normalization(self._scheme, states, actions)

    def rows(
        self, rows: NDArray[np.int64], horizon: int = 0, first_action: int = 0, observed_steps: int = 1
    ) -> tuple[Observation, Array, NDArray[np.bool_]]:
        """Return the observations of some rows, and the actions from there on.

        Args:
            rows: n of them.
            horizon: H, the number of actions; 0: C.
            first_action: the first of these actions, relative to the row.
            observed_steps: T, consecutive observations, see `BasePolicy`.

        Returns:
            Observations; actions [n, H, A]; and which actions were executed, bool [n, H]. Beyond an end of the episode,
            its last observation or action is repeated.
        """
        data = self.demonstrations
        observations = self._numbers(rows)
        if observed_steps > 1:
            earlier = rows[:, None] + np.arange(1 - observed_steps, 0)
            seen = self._numbers(np.maximum(earlier, self._first[rows][:, None]).ravel())
            observations |= {
                past_key(name): array.reshape(*earlier.shape, *array.shape[1:]) for name, array in seen.items()
            }
        if self.spec.has_instructions:
            observations[INSTRUCTIONS] = np.array(data.tasks)[data.task_of[rows]]
        wanted = rows[:, None] + first_action + np.arange(horizon or self._chunk)
        there = np.clip(wanted, self._first[rows][:, None], self._last[rows][:, None])
        return observations, data.actions[there], there == wanted

    def _numbers(self, rows: NDArray[np.int64]) -> Observation:
        data = self.demonstrations
        observations: Observation = {image_key(name): camera.read(rows) for name, camera in self._cameras.items()}
        if self.spec.state_size and data.states is not None:
            observations[STATES] = data.states[rows]
        return observations

    def loss(self, policy: BasePolicy, count: int) -> Tensor:
        """Return the mean loss of a random batch of rows, drawn from torch's own generator."""
        rows = self._imitated[self._places(count)]
        observations, actions, valid = self.rows(rows, policy.horizon, policy.first_action, policy.observed_steps)
        if self._shifts:
            observations = {name: shifted(pictures) for name, pictures in observations.items()}
        taken = policy.from_env(actions)
        counted = torch.from_numpy(valid).to(taken.device)  # pyright: ignore[reportUnknownMemberType]
        return policy.imitation_loss(policy.prepare(observations), taken, counted)

    def _places(self, count: int) -> NDArray[np.int64]:
        """Return the indices of the drawn rows among the imitated ones."""
        if self._drawn is None:
            return torch.randint(len(self._imitated), (count,)).numpy()
        chances = torch.rand(count, dtype=torch.float64) * self._drawn[-1]
        return torch.searchsorted(self._drawn, chances, right=True).clamp(max=len(self._drawn) - 1).numpy()


def shifted(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return images [n, H, W, channels], each shifted randomly with its edges repeated; uses torch's own generator.

    The random shifts of DrQ (arXiv 2004.13649).
    """
    _, height, width, _ = pictures.shape
    up, left = int(height * _SHIFT), int(width * _SHIFT)
    wide = np.pad(pictures, ((0, 0), (up, up), (left, left), (0, 0)), mode="edge")
    rows, columns = (
        torch.randint(2 * room + 1, (len(pictures), 1)) + torch.arange(size)
        for room, size in ((up, height), (left, width))
    )
    return wide[np.arange(len(pictures))[:, None, None], rows.numpy()[:, :, None], columns.numpy()[:, None, :]]


def imitated_rows(data: Demonstrations, *, only_interventions: bool) -> NDArray[np.int64]:
    """Return the rows whose actions are imitated: all, or those with interventions.

    Raises:
        DatasetError: there are no interventions, or no data set marks them.
    """
    if not only_interventions:
        return np.arange(len(data))
    if data.interventions is None:
        raise without_interventions(data)
    rows = np.flatnonzero(data.interventions)
    if not len(rows):
        raise DatasetError(
            "the demonstrations contain no interventions",
            where=data.where,
            help="remove `data.only_interventions`, or record corrections with `rlinf record RUN --device`",
        )
    return rows


def chances_of(data: Demonstrations, imitated: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Return the relative frequency of drawing each imitated row; None: all equal.

    A data set with fewer imitated rows keeps its share.
    """
    if data.draws is None:
        return None
    ends = np.cumsum([origin.episodes for origin in data.origins])
    owners = np.searchsorted(data.bounds[ends], np.arange(len(data)), side="right")
    chosen = owners[imitated]
    shares = np.bincount(owners, data.draws, len(ends))
    drawn = np.bincount(chosen, data.draws[imitated], len(ends))
    return data.draws[imitated] * (shares / np.where(drawn > 0, drawn, 1))[chosen]


def labelled_by_success(data: Demonstrations) -> Demonstrations:
    """Return images labeled, instead of with actions, with whether they show the task solved, int64 [N, 1].

    A row's image precedes its action, and `successes` follow it: the label is the previous row's success.

    Raises:
        DatasetError: there are no images, or none of a solved task.
    """
    if not data.cameras or data.successes is None:
        missing = "pictures" if not data.cameras else "successes"
        raise DatasetError(
            f"the demonstrations have no {missing}: success cannot be learned from them",
            where=data.where,
            help="record an environment with a camera, with `rlinf record`",
        )
    labels = np.concatenate(([False], data.successes[:-1]))
    labels[data.bounds[:-1]] = False
    if not labels.any():
        raise DatasetError(
            "no picture of the demonstrations shows the task solved",
            where=data.where,
            help="record beyond the success, with `rlinf record ... env.train.ignore_terminations=true`",
        )
    return replace(data, actions=labels.astype(np.int64)[:, None], states=None, statistics=None, interventions=None)


def spec_of_pictures(data: Demonstrations) -> EnvSpec:
    """Return the spec of a classifier: all cameras, and one of two choices."""
    return EnvSpec(0, 1, num_choices=2, cameras={name: camera.shape for name, camera in data.cameras.items()})


def balanced_rows(data: Demonstrations) -> NDArray[np.int64]:
    """Return all rows, with those of the rarer label repeated so that both labels are about equally frequent."""
    kinds = [np.flatnonzero(data.actions[:, 0] == label) for label in (0, 1)]
    if not all(map(len, kinds)):  # among the chosen episodes
        raise DatasetError("the chosen episodes show only one outcome", where=data.where, help="choose more episodes")
    longest = max(map(len, kinds))
    return np.concatenate([np.resize(rows, longest) for rows in kinds])


def spec_of(data: Demonstrations) -> EnvSpec:
    """Return the spec of a data set's observations and actions.

    Raises:
        DatasetError: actions are integers, and not one choice from 0.
    """
    choices = data.actions.dtype.kind in "iu"
    if choices and (data.actions.shape[1] != 1 or data.actions.min() < 0):
        size, least = data.actions.shape[1], data.actions.min()
        raise DatasetError(
            f"an action is {size} integers, the least of which is {least}; a discrete action is one integer from 0",
            where=data.where,
            help="declare numbers as `float32` in `meta/info.json`, or convert the data set again",
        )
    return EnvSpec(
        state_size=0 if data.states is None else data.states.shape[1],
        action_size=data.actions.shape[1],
        num_choices=int(data.actions.max()) + 1 if choices else None,
        cameras={name: camera.shape for name, camera in data.cameras.items()},
        has_instructions=True,
    )
