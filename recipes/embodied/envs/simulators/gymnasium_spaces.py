"""Conversion of Gymnasium spaces to observations and actions, and checks of observations against them."""

# Gymnasium is an optional package: the checker of types runs without it.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate
from numpy.typing import NDArray

from recipes.embodied.envs.env_spec import EnvSpec, FloatArray, Observation, native_actions
from recipes.embodied.envs.observation_keys import INSTRUCTIONS, MAIN_CAMERA, STATES, image_key
from recipes.embodied.envs.processes.simulator import Row
from recipes.training.arrays import Array
from rlinf_core import ConfigError

OWN: Final = "wrap it in an environment of your own, `env_type: package.module:Class`"
# Larger bounds, such as the largest float32, mean that there is no bound: halves and sums of them are infinite.
_NO_BOUND: Final = 1e30
# A larger range is that of the type itself, such as int64, and not of real choices.
_MOST_WHOLE: Final = 2**31
_COLOURS: Final = 3
# The least sides of an array for numbers from 0 to 255, or floats in an image's layout, to count as an image.
_SMALLEST_PICTURE: Final = 16
_PICTURE_DIMENSIONS: Final = 3
_BYTE: Final = 255
# A number that exceeds a bound by up to this share of it counts as rounded.
_ROUNDING: Final = 1e-5
_LOGGER: Final = logging.getLogger("rlinf")
# Warnings about observations that this process has logged, to log each once.
_warned: set[str] = set()


class _Part(NamedTuple):
    """A leaf space within the dictionaries and tuples of an observation."""

    path: tuple[str | int, ...]
    space: spaces.Space[Any]

    @property
    def name(self) -> str:
        return ".".join(str(key) for key in self.path)

    def of(self, observation: Any) -> Any:
        for key in self.path:
            observation = observation[key]
        return observation


class Reader:
    """Converts observations of a space to rows.

    Dictionaries and tuples may be nested; a part is named by its path, `arm.wrist`.

    Args:
        task: the name of the task, for errors.
        space: the space of the observations.

    Attributes:
        state_size: the number of values in `states`.
        cameras: (H, W, 3) of the images, by camera.
        instruction: name of the part that holds the instruction; None: no instruction.

    Raises:
        ConfigError: a part of the space is not supported.
    """

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        parts = list(_parts(space))
        layouts = {part.name: _layout(task, part) for part in parts}
        pictures = [part for part in parts if layouts[part.name] is not None]
        texts = [part for part in parts if part.path and isinstance(part.space, spaces.Text)]
        if len(texts) > 1:
            named = " and ".join(f"`{part.name}`" for part in texts)
            raise _not_understood(task, f"{named} are both texts, but there is only one instruction")
        self._task = task
        self._pictures = {image_key(part.name or MAIN_CAMERA): (part, layouts[part.name] or "") for part in pictures}
        self.cameras: dict[str, Any] = {
            part.name or MAIN_CAMERA: _size(part.space.shape or (), layouts[part.name] or "") for part in pictures
        }
        self._text = texts[0] if texts else None
        self.instruction = texts[0].name if texts else None
        self._states = [part for part in parts if part not in pictures and part not in texts]
        for part in self._states:
            if not isinstance(part.space, spaces.Box | spaces.Discrete | spaces.MultiBinary):
                raise _not_understood(task, f"{f'`{part.name}` is ' if part.name else ''}{part.space}")
            if not _length(part.space):
                raise _not_understood(task, f"{f'`{part.name}`' if part.name else 'it'} has no numbers: {part.space}")
        if len(layouts) != len(parts):
            raise _not_understood(task, f"two parts have one name: {space}")
        # The shape of an observation that is a single vector of numbers.
        alone = self._states[0].space if len(parts) == len(self._states) == 1 else None
        self._plain: tuple[int, ...] | None = None
        if isinstance(alone, spaces.Box) and np.issubdtype(alone.dtype, np.floating) and len(alone.shape) == 1:
            self._plain = alone.shape
        self.state_size = sum(_length(part.space) for part in self._states)
        low, high = (
            np.concatenate([np.zeros(0), *(_bounds(part.space)[side] for part in self._states)]) for side in (0, 1)
        )
        # In the dtype of states, to make comparisons cheap.
        with np.errstate(over="ignore", invalid="ignore"):
            self._low = (low - _ROUNDING * np.abs(low)).astype(np.float32)
            self._high = (high + _ROUNDING * np.abs(high)).astype(np.float32)

    @property
    def mapping(self) -> str:
        """The conversion of observation parts to our observations, in words."""
        states = [f"{part.name or 'the observation'}{_size_in_words(part.space)}" for part in self._states]
        kinds = [f"states [{self.state_size}] = {' + '.join(states)}"] if states else []
        kinds += [f"{key} = {part.name or 'the observation'}" for key, (part, _) in self._pictures.items()]
        return ", ".join([*kinds, *([f"{INSTRUCTIONS} = {self.instruction}"] if self.instruction else [])])

    def __call__(self, observation: Any) -> Row:
        """Return an observation of the space as a row.

        Raises:
            ConfigError: the observation is not in the space.
        """
        is_array = self._plain is not None and type(observation) is np.ndarray
        if is_array and observation.dtype == np.float32 and observation.shape == self._plain:
            return {STATES: observation.copy()}  # a fast path for cheap environments
        row: Row = {}
        for key, (part, layout) in self._pictures.items():
            row[key] = _colours(self._held(part, observation), layout)
        if self._text is not None:
            row[INSTRUCTIONS] = self._held(self._text, observation)
        if self._states:
            vectors = [_vector(part.space, self._held(part, observation)) for part in self._states]
            row[STATES] = np.concatenate(vectors) if len(vectors) > 1 else vectors[0]
        return row

    def together(self, observations: Sequence[Any] | Array) -> Observation | None:
        """Return n observations of the space in new arrays [n, ...], much faster than one by one.

        Returns:
            None if they are not plain vectors of numbers, or one is not in the space.
        """
        if self._plain is None:
            return None
        try:
            states = np.array(observations)
        except ValueError:  # the shapes differ
            return None
        if states.shape[1:] != self._plain or states.dtype.kind not in "fiub":
            return None
        return {STATES: states if states.dtype == np.float32 else states.astype(np.float32)}

    def batch(self, space: spaces.Space[Any], observation: Any) -> Observation:
        """Return an observation of a vector of environments as arrays [n, ...]; log the first number out of its bounds.

        Args:
            space: the observation space of the vector.
            observation: an observation in that space.

        Raises:
            ConfigError: an observation is not in the space of a single environment.
        """
        seen = self.together(observation) if isinstance(observation, np.ndarray) else None
        if seen is None:
            rows = [self(row) for row in iterate(space, observation)]
            seen = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        self.check_bounds(seen)
        return seen

    def check_bounds(self, observations: Observation) -> None:
        """Log the first number of observations [n, ...] that is out of its bounds, once per task."""
        if not self._states or self._task in _warned:
            return
        states = observations[STATES]
        beyond = (states < self._low) | (states > self._high)
        if np.count_nonzero(beyond):
            self._tell_beyond(states[int(beyond.any(axis=1).argmax())])

    def _tell_beyond(self, states: FloatArray) -> None:
        """Log the first number of states that is out of its bounds."""
        _warned.add(self._task)
        numbers = [(part, number) for part in self._states for number in range(_length(part.space))]
        index = int(np.flatnonzero((states < self._low) | (states > self._high))[0])
        part, number = numbers[index]
        low, high = _bounds(part.space)
        name = f"`{part.name}` of an observation" if part.name else "an observation"
        message = "%s of `%s` leaves its space: number %d is %g, and its bounds are %g and %g; it is used as it is"
        _LOGGER.warning(message, name, self._task, number, states[index], low[number], high[number])

    def _held(self, part: _Part, observation: Any) -> Any:
        try:
            value = part.of(observation)
        except (KeyError, IndexError, TypeError) as error:
            raise self._wrong(part, f"has no `{part.name}`", str(part.space)) from error
        space = part.space
        if isinstance(space, spaces.Text):
            if not isinstance(value, str):
                raise self._wrong(part, f"is {value!r}", "a text")
            return value
        if isinstance(space, spaces.Discrete):
            if not space.contains(np.asarray(value).reshape(()).astype(np.int64) if _is_whole(value) else value):
                raise self._wrong(part, f"is {value!r}", f"{space}")
            return value
        array = np.asarray(value)
        if array.shape != tuple(space.shape or ()):
            raise self._wrong(part, f"has the shape {list(array.shape)}", f"{list(space.shape or ())}")
        if space.dtype == np.uint8 and array.dtype != np.uint8:
            raise self._wrong(part, f"has numbers of the type {array.dtype}", "uint8")
        if array.dtype.kind not in "fiub":
            raise self._wrong(part, f"has values of the type {array.dtype}", str(space.dtype))
        return array

    def _wrong(self, part: _Part, what: str, said: str) -> ConfigError:
        name = f"`{part.name}` of an observation" if part.name else "an observation"
        return ConfigError(
            f"{name} of `{self._task}` {what}, but its space says {said}",
            where="env.task",
            help="correct the environment's `observation_space`, or what it returns",
        )


class Writer:
    """A converter of batched actions to an environment's action space.

    Attributes:
        size: the number of values in an action.
        num_choices: see `EnvSpec`.
        low, high, whole: see `EnvSpec`.

    Raises:
        ConfigError: the action space is not supported.
    """

    def __init__(self, task: str, space: spaces.Space[Any]) -> None:
        self.num_choices: int | None = None
        self.whole = False
        if isinstance(space, spaces.Discrete):
            self.size, self.num_choices, self._type = 1, int(space.n), space.dtype
            first = int(space.start)
            self.low: tuple[float | None, ...] = (first,)
            self.high: tuple[float | None, ...] = (first + self.num_choices - 1,)
            return
        if not isinstance(space, spaces.Box):
            raise ConfigError(f"unsupported action space of `{task}`: {space}", help=OWN)
        self.size, self._shape, self._type = _length(space), space.shape, space.dtype
        if not self.size:
            raise ConfigError(f"unsupported action space of `{task}`: it has no numbers: {space}", help=OWN)
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))
        self.whole = np.dtype(space.dtype).kind in "iub"
        if self.whole and (high - low >= _MOST_WHOLE).any():
            raise ConfigError(f"the action space of `{task}` is unbounded: {space}", help=OWN)
        self.low, self.high = (
            tuple(bound if abs(bound) < _NO_BOUND else None for bound in bounds.tolist()) for bounds in (low, high)
        )

    @property
    def mapping(self) -> str:
        """The numbers or choices of an action, in words."""
        if self.num_choices is not None:
            return f"actions = one of {self.num_choices} choices"
        bounded = None not in self.low and None not in self.high
        stretched = ", -1..1 stretched to the bounds of the space" if bounded else ""
        return f"actions = {self.size} number{'s' if self.size > 1 else ''}{stretched}"

    def __call__(self, actions: Array) -> Any:
        """Return actions [n, A] for `step`: within the space, and integers for integer spaces."""
        native = native_actions(actions, self.low, self.high, chooses=self.num_choices is not None, whole=self.whole)
        if self.num_choices is not None:
            # In the space's own dtype, which Gymnasium checks in half the time of Python's int.
            return native[:, 0].astype(self._type)
        return native.astype(self._type).reshape(-1, *self._shape)


def _parts(space: spaces.Space[Any], path: tuple[str | int, ...] = ()) -> Iterator[_Part]:
    inner = (
        space.spaces.items()
        if isinstance(space, spaces.Dict)
        else enumerate(space.spaces)
        if isinstance(space, spaces.Tuple)
        else None
    )
    if inner is None:
        yield _Part(path, space)
        return
    for key, inner_space in inner:
        yield from _parts(inner_space, (*path, key))


def _layout(task: str, part: _Part) -> str | None:
    """Return the order of an image's dimensions, such as `HWC`; None if a part is not an image.

    Raises:
        ConfigError: it is an unsupported image, such as a stack of frames.
    """
    space = part.space
    if not isinstance(space, spaces.Box):
        return None
    shape = space.shape
    is_byte = space.dtype == np.uint8
    if len(shape) == _PICTURE_DIMENSIONS:
        if is_byte and not _is_full(space) and not _is_large(shape):
            return None  # a grid of numbers
        if is_byte and not _is_full(space):
            bounds = f"{space.low.min()} to {space.high.max()}"
            raise _no_picture(task, part, f"its numbers go from {bounds}, and those of a camera from 0 to {_BYTE}")
        if is_byte and shape[-1] in (1, _COLOURS):
            return "HWC"
        if is_byte and shape[0] in (1, _COLOURS):
            return "CHW"
        has_channels = shape[-1] in (1, 3, 4) or shape[0] in (1, 3, 4)
        if not is_byte and not (has_channels and _is_large(shape)):
            return None
    elif len(shape) == _PICTURE_DIMENSIONS - 1 and is_byte and _is_large(shape):
        return "HW" if _is_full(space) else None
    elif len(shape) <= _PICTURE_DIMENSIONS or not is_byte:
        return None
    raise _no_picture(task, part, f"is not a single one: {space.dtype}{list(shape)}")


def _no_picture(task: str, part: _Part, why: str) -> ConfigError:
    name = f"`{part.name}`" if part.name else "the observation"
    return ConfigError(
        f"{name} of `{task}` looks like an image, but {why}",
        where="env.task",
        help="a camera is uint8 [H, W, 3], [3, H, W], or grey [H, W]; " + OWN + ", that stacks or turns it into these",
    )


def _is_full(space: spaces.Box) -> bool:
    """Return whether the range of a part is that of colors, 0 to 255."""
    return bool((space.low == 0).all() and (space.high == _BYTE).all())


def _is_large(shape: tuple[int, ...]) -> bool:
    return sorted(shape)[-2] >= _SMALLEST_PICTURE


def _size(shape: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    return shape[layout.index("H")], shape[layout.index("W")], _COLOURS


def _colours(picture: Array, layout: str) -> NDArray[np.uint8]:
    """Convert an image to new uint8 [H, W, 3]; grey becomes RGB."""
    if layout == "HW":
        picture = picture[..., None]
    if layout == "CHW":
        picture = picture.transpose(1, 2, 0)
    return np.array(np.broadcast_to(picture, (*picture.shape[:2], _COLOURS)), order="C")


def _is_whole(value: Any) -> bool:
    array = np.asarray(value)
    return array.size == 1 and array.dtype.kind in "iub"


def _length(space: spaces.Space[Any]) -> int:
    return int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape or (1,))


def _size_in_words(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Discrete):
        return f" [{space.n}, one-hot]"
    return f" {list(space.shape or ())}"


def _bounds(space: spaces.Space[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least and the greatest value of each state that a space becomes."""
    if not isinstance(space, spaces.Box):
        return np.zeros(_length(space)), np.ones(_length(space))
    return np.asarray(space.low, np.float64).reshape(-1), np.asarray(space.high, np.float64).reshape(-1)


def _vector(space: spaces.Space[Any], value: Any) -> FloatArray:
    if isinstance(space, spaces.Discrete):
        vector = np.zeros(int(space.n), np.float32)
        vector[int(np.asarray(value).reshape(())) - int(space.start)] = 1
        return vector
    return np.array(value, np.float32).reshape(-1)


def spec_of(reads: Reader, writes: Writer) -> EnvSpec:
    """Return the spec that the spaces of a task define."""
    return EnvSpec(
        state_size=reads.state_size,
        action_size=writes.size,
        num_choices=writes.num_choices,
        cameras=reads.cameras,
        has_instructions=reads.instruction is not None,
        low=writes.low,
        high=writes.high,
        whole=writes.whole,
    )


def _not_understood(task: str, what: str) -> ConfigError:
    return ConfigError(f"unsupported observation space of `{task}`: {what}", where="env.task", help=OWN)
