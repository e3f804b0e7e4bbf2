"""Transfer of exceptions between processes, and the error of a group call."""

from __future__ import annotations

import io
import logging
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType
from typing import Any, Final, cast

from rlinf_core.errors import (
    CancelledOperationError,
    ChannelClosed,
    CommunicationTimeoutError,
    DeadlockError,
    PeerNotFoundError,
    RemoteError,
    RLinfError,
    WorkerDiedError,
)
from rlinf_core.suggest import clipped

_log = logging.getLogger("rlinf")
# The cause of the death of a worker whose group was shut down.
SHUT_DOWN: Final = "its group was shut down"

# Errors that are consequences of another worker's failure.
_CONSEQUENCES = (
    WorkerDiedError,
    CommunicationTimeoutError,
    DeadlockError,
    CancelledOperationError,
    ChannelClosed,
    PeerNotFoundError,
)

# Frames of the runtime that call worker methods, irrelevant for user code.
_CALLED_FROM = "/rlinf_core/worker/process.py"
# Maximum characters of a message in a summary.
_SUMMARY_LENGTH = 200


@dataclass(frozen=True, slots=True)
class PackedError:
    """A serialised exception for another process; it always pickles, whatever the exception holds.

    Attributes:
        pickled: the exception itself, or None when it does not pickle.
        type_name, text: the full name of its type, and its message.
        traceback: its traceback as text; empty if it was never raised.
        where: the worker that raised it, as in `actor:3`, or None.
    """

    pickled: bytes | None
    type_name: str
    text: str
    traceback: str
    where: str | None

    @classmethod
    def of(cls, error: BaseException, where: str | None = None) -> PackedError:
        """Return `error` as raised in the worker `where`."""
        try:
            pickled = _dumps(error)
        except Exception:  # noqa: BLE001 - pickling runs code of arbitrary types, which can raise anything
            pickled = None
        kind = type(error)
        return cls(pickled, f"{kind.__module__}.{kind.__qualname__}", text_of(error), _traceback(error), where)

    @property
    def summary(self) -> str:
        """Its type and the first line of its message, as in `ValueError: no camera`."""
        name = self.type_name.removeprefix("builtins.").removeprefix("__main__.")
        line = self.text.strip().partition("\n")[0]
        line = line if len(line) <= _SUMMARY_LENGTH else f"{line[:_SUMMARY_LENGTH]}..."
        return f"{name}: {line}" if line else name

    def unpack(self) -> Exception:
        """Return the exception itself if its type exists here, else a `RemoteError`; a note holds the original
        traceback.

        The bytes come from a worker of this cluster over an authenticated connection.
        """
        error = self._original()
        if error is None:
            error = RemoteError(self.type_name, self.text, traceback=self.traceback or None, where=self.where)
        if self.traceback:
            error.add_note(f"raised in {self.where or 'another process'}:\n{self.traceback.rstrip()}")
        return error

    def _original(self) -> Exception | None:
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)  # noqa: S301 - see unpack
        except Exception:  # noqa: BLE001 - rebuilding runs code of arbitrary types, which can raise anything
            return None
        # SystemExit and KeyboardInterrupt of another process must not end this one.
        return error if isinstance(error, Exception) else None


class _Pickler(pickle.Pickler):
    """A pickler of exceptions whose constructors unpickling does not call: they may take other arguments than `args`.

    A type of the main script is pickled by name: the receiving driver has the type itself.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj.__module__ == "__main__":
            return _type_of_main, (obj.__qualname__,)
        kind = cast("type[object]", type(obj))
        if not isinstance(obj, BaseException) or isinstance(obj, BaseExceptionGroup):
            return NotImplemented
        if kind.__reduce__ is not BaseException.__reduce__ or not isinstance(kind.__init__, FunctionType):
            return NotImplemented
        return _rebuild, (kind, obj.args, obj.__dict__)


def _type_of_main(name: str) -> type[object]:
    value = attrgetter(name)(sys.modules["__main__"])
    if not isinstance(value, type):
        raise TypeError(f"`{name}` of the main script is not a type")
    return cast("type[object]", value)


def _rebuild(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _dumps(error: BaseException) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(error)
    return buffer.getvalue()


def text_of(error: BaseException) -> str:
    """Return the message of an exception of any type."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a user's __str__ can raise anything; it must not hide the error
        return f"(its message cannot be shown: {type(broken).__name__})"


def _traceback(error: BaseException) -> str:
    if error.__traceback__ is None:
        return ""
    outermost = error.__traceback__
    while outermost.tb_next is not None and outermost.tb_frame.f_code.co_filename.endswith(_CALLED_FROM):
        outermost = outermost.tb_next
    report = traceback.TracebackException(type(error), error, outermost)
    # The notes are pickled with the exception, and would otherwise appear twice.
    report.__notes__ = None  # pyright: ignore[reportAttributeAccessIssue] - typeshed lacks it
    return "".join(report.format())


class WorkerGroupError(RLinfError, ExceptionGroup[Exception]):
    """A call on a worker group failed on some ranks; an exception group of the original exceptions.

    `except* ValueError` matches the ranks' own exceptions. Root causes come first: a rank that failed on its own
    precedes one that failed because a peer died, timed out or closed a channel.

    Attributes:
        group: the name of the worker group.
        method: the method that was called, or `__init__` for the launch.
        world_size: the number of workers in the group.
        ranks: the failed ranks, in the order of `exceptions`.
        places: where failed ranks ran, as in `node 1 (10.0.0.2), pid 4711`, by rank if known.
    """

    group: str
    method: str
    world_size: int
    ranks: tuple[int, ...]
    places: Mapping[int, str]

    def __new__(cls, group: str, method: str, failures: Mapping[int, Exception], world_size: int) -> WorkerGroupError:
        if not failures:
            raise ValueError("a group error needs at least one worker's failure")
        ordered = sorted(failures.items(), key=lambda item: (is_consequence(group, *item), item[0]))
        ranks = tuple(rank for rank, _ in ordered)
        first = ordered[0][1]
        message = (
            f"{len(ordered)} of {world_size} workers of `{group}` failed in `{method}`, "
            f"first rank {ranks[0]}: {type(first).__name__}: {text_of(first)}"
        )
        self = super().__new__(cls, clipped(message), [error for _, error in ordered])
        self.group, self.method, self.world_size, self.ranks = group, method, world_size, ranks
        return self

    def __init__(self, group: str, method: str, failures: Mapping[int, Exception], world_size: int) -> None:
        # `message` is the exception group's own read-only field, so RLinfError.__init__ cannot set it.
        self.where = None
        self.why = None
        self.help = None
        self.places = {}

    @property
    def by_rank(self) -> dict[int, Exception]:
        """Each failed rank's exception, by rank."""
        return dict(sorted(zip(self.ranks, self.exceptions, strict=True)))

    def derive(self, excs: Sequence[Exception], /) -> WorkerGroupError:  # pyright: ignore[reportIncompatibleMethodOverride] - typeshed's is generic over any exception
        """Return the same failure with only some of its exceptions; `except*` calls it."""
        # A rank's exception may itself be a reduced group: a leaf identifies its rank.
        owners = {
            id(leaf): rank for rank, error in zip(self.ranks, self.exceptions, strict=True) for leaf in _leaves(error)
        }
        failures = {owners[id(next(_leaves(error)))]: error for error in excs}
        part = WorkerGroupError(self.group, self.method, failures, self.world_size)
        part.places = {rank: place for rank, place in self.places.items() if rank in failures}
        return part

    def __reduce__(self) -> tuple[Any, ...]:
        packed = tuple((rank, PackedError.of(error, f"{self.group}:{rank}")) for rank, error in self.by_rank.items())
        return _rebuild_group, (self.group, self.method, packed, self.world_size, self.__dict__)


def _rebuild_group(
    group: str, method: str, packed: Sequence[tuple[int, PackedError]], world_size: int, state: dict[str, Any]
) -> WorkerGroupError:
    error = WorkerGroupError(group, method, {rank: packed_error.unpack() for rank, packed_error in packed}, world_size)
    # Not in rank order: an exception that cannot be rebuilt here may change it.
    error.__dict__.update({name: value for name, value in state.items() if name != "ranks"})
    return error


def is_consequence(group: str, rank: int, error: Exception) -> bool:
    """Return whether rank `rank` of a group failed with `error` as a consequence of another worker's failure."""
    own_death = isinstance(error, WorkerDiedError) and error.address == f"{group}:{rank}"
    return isinstance(error, _CONSEQUENCES) and not own_death


def followed(error: BaseException) -> bool:
    """Return whether an error of this process is a consequence of a worker's failure."""
    if isinstance(error, WorkerGroupError):
        return is_consequence(error.group, error.ranks[0], error.exceptions[0])
    return isinstance(error, _CONSEQUENCES) and not _concerns_all(error)


def ended_by_shutdown(failure: WorkerGroupError) -> bool:
    """Return whether a call failed on each rank because the group was shut down or the worker's process ended."""
    return all(isinstance(error, (CancelledOperationError, WorkerDiedError)) for error in failure.exceptions)


def set_cause(error: BaseException, cause: WorkerGroupError) -> bool:
    """Set the cause of `error` to the failure that led to it; a traceback shows the cause first.

    Returns:
        False if it already has a cause, or is not a consequence of a worker's failure.
    """
    if error is cause or error.__cause__ is not None or not followed(error):
        return False
    error.__cause__ = cause
    error.add_note(f"followed from the failure of `{cause.group}:{cause.ranks[0]}` in `{cause.method}`")
    return True


def raise_unseen(failures: Sequence[WorkerGroupError], *, instead_of: BaseException | None = None) -> None:
    """Raise the root cause among the failures of calls whose results were never read, and log the others.

    `instead_of` is the exception being raised: it is kept, and gets the failure as its cause.
    """
    first: BaseException | None = instead_of
    for failure in sorted(failures, key=followed):
        if first is None:
            first = failure
        elif first is failure or first.__cause__ is failure:
            continue
        elif instead_of is not None and followed(failure) and (followed(first) or _concerns_all(first)):
            # Both are consequences: this failure may come from workers ended since, or that lost the same process.
            continue
        elif _repeats_death_of(failure, first) or (not followed(failure) and set_cause(first, failure)):
            continue
        else:
            _log.error("another call failed, and its result was never read: %s", failure.message)
    if first is not None and instead_of is None:
        raise first


def _concerns_all(error: BaseException) -> bool:
    return isinstance(error, WorkerDiedError) and error.concerns_all


def _repeats_death_of(failure: WorkerGroupError, first: BaseException) -> bool:
    """Return whether a failure is just the death of a worker whose failure is already reported."""
    last_failure = failure.exceptions[0]
    reported = {f"{first.group}:{rank}" for rank in first.ranks} if isinstance(first, WorkerGroupError) else set[str]()
    return isinstance(last_failure, WorkerDiedError) and last_failure.address in reported


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in cast("BaseExceptionGroup[BaseException]", error).exceptions:
            yield from _leaves(inner)
    else:
        yield error
