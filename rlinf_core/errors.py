"""The errors that rlinf raises on purpose: what happened, where, why, and what to do about it.

    RLinfError
      ConfigError                     the configuration is wrong
      PlacementError                  processes cannot be placed as requested
      InvalidNameError                also ValueError
      EnvironmentVariableError        also ValueError
      ClusterError                    the cluster is unreachable, or cannot start what was requested
        RayStartError
        DeviceHeldError               another job holds an accelerator or a robot
      RunError                        a run folder cannot be written, read or found
        CheckpointError
      WorkerGroupError                also ExceptionGroup: a call failed on some ranks (in `failures`)
      RuntimeFailure                  base of failures between processes
        UnknownGroupError             also LookupError
        PeerNotFoundError             also LookupError
        WorkerDiedError
        CommunicationTimeoutError     also TimeoutError
        DeadlockError
        CancelledOperationError
        PayloadError                  an object cannot be sent
        MismatchError                 also ValueError: the two sides of a transfer do not fit
        AuthenticationError
        RemoteError                   stands for an exception whose type cannot be rebuilt here
        ChannelError
          ChannelClosed
          ChannelFull                 also asyncio.QueueFull (in `channel.operation`)
          ChannelEmpty                also asyncio.QueueEmpty (in `channel.operation`)

`rlinf_core` exports those that programs catch most. Every one survives pickling with its fields, because it may be
raised in a worker and read in the driver.
"""

from __future__ import annotations

import signal as signals
from typing import Any, NamedTuple

from rlinf_core.suggest import clipped, did_you_mean, quoted


class ProcessEnd(NamedTuple):
    """The end of a process, as its kernel reports it; nothing is inferred.

    Attributes:
        signal: the name of the signal that ended it, or None.
        exit_code: the exit code that it ended with, or None.
        out_of_memory: the kernel's words on a kill for memory of this process, or in its control group; None if there
            are none.
    """

    signal: str | None = None
    exit_code: int | None = None
    out_of_memory: str | None = None

    @classmethod
    def from_exit_code(cls, code: int) -> ProcessEnd:
        """Return the end that an exit code stands for; a negative code is the number of a signal."""
        if code >= 0:
            return cls(None, code)
        try:
            return cls(signals.Signals(-code).name)
        except ValueError:
            return cls(f"signal {-code}")

    @property
    def words(self) -> str:
        """The end as a sentence without its subject's name."""
        if self.out_of_memory is not None:
            return f"the kernel killed it because memory ran out ({self.out_of_memory})"
        if self.signal is not None:
            return f"it was killed by {self.signal}"
        return f"it ended with exit code {self.exit_code}"


class RLinfError(Exception):
    """Base of all errors that rlinf raises on purpose.

    Attributes:
        message: what happened, one sentence without a final full stop.
        where: the location (a file position, a component and rank, a node), or None.
        why: the cause, if known and not part of the message, or None.
        help: the remedy, or None.
        code: the stable name of its kind of failure, as in `deadlock`, which `rlinf why` knows; empty without one.

    Enormous texts are shortened (see `clipped`).
    """

    code: str = ""

    def __init__(
        self,
        message: str,
        *,
        where: str | None = None,
        why: str | None = None,
        help: str | None = None,
        code: str | None = None,
    ) -> None:
        # gymnasium constructs an error of this type with another error as its message; the caller unwraps it.
        message = clipped(message) if isinstance(message, str) else message  # pyright: ignore[reportUnnecessaryIsInstance]
        super().__init__(message)
        self.message = message
        self.where = where and clipped(where)
        self.why = why and clipped(why)
        self.help = help and clipped(help)
        self.code = code or self.code

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        for label, part in (("why", self.why), ("help", self.help)):
            if part:
                text += f"\n  {label}: {part}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[RLinfError], args: tuple[Any, ...], state: dict[str, Any]) -> RLinfError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(RLinfError):
    """The configuration is invalid; `str()` lists every finding as `rlinf validate` prints it."""


class PlacementError(RLinfError):
    """Processes cannot be placed as requested."""


class InvalidNameError(RLinfError, ValueError):
    """A name or an address is not well formed."""


class EnvironmentVariableError(RLinfError, ValueError):
    """The environment variable `name` has an invalid `value`."""

    def __init__(self, name: str, value: str, *, expected: str, help: str | None = None) -> None:
        super().__init__(f"`{name}` is `{value}`, expected {expected}", where="environment", help=help)
        self.name = name
        self.value = value


class RuntimeFailure(RLinfError):  # noqa: N818 - a branch of the tree, never raised itself
    """Base of failures between the processes of a running job."""


class UnknownGroupError(RuntimeFailure, LookupError):
    """The job has not declared or launched a group of this name; `known` are its groups.

    `kind` is `channel` for the name of a channel, whose process is a group, too.
    """

    def __init__(self, group: str, known: tuple[str, ...], *, where: str | None = None, kind: str = "group") -> None:
        listed = quoted(sorted(known)) or "none"
        super().__init__(
            f"no {kind} is named `{group}`",
            where=where,
            why=f"{kind}s of this job: {listed}",
            help=did_you_mean(group, known),
        )
        self.group = group
        self.known = known


class PeerNotFoundError(RuntimeFailure, LookupError):
    """The group is known, but the worker `address`, as in `actor:3`, does not exist or was not launched in time."""

    def __init__(
        self, address: str, message: str, *, where: str | None = None, why: str | None = None, help: str | None = None
    ) -> None:
        super().__init__(message, where=where, why=why, help=help)
        self.address = address


class WorkerDiedError(RuntimeFailure):
    """A process that the operation depends on is gone.

    Attributes:
        address: the worker that died, as in `actor:3`.
        node: where it ran, as in `node 1 (10.0.0.2)`, or None if unknown.
        cause: why it died, as far as known.
        end: how its process ended, or None if unknown.
    """

    def __init__(
        self,
        address: str,
        *,
        node: str | None = None,
        cause: str | None = None,
        end: ProcessEnd | None = None,
        where: str | None = None,
    ) -> None:
        place = f" on {node}" if node else ""
        super().__init__(
            f"`{address}`{place} died", where=where, why=cause or "it was killed, or exited without an exception"
        )
        self.end = end
        self.address = address
        self.node = node
        self.cause = cause

    @property
    def concerns_all(self) -> bool:
        """Whether all workers depend on the process, as on `gcs_server`. Only a worker's address has a rank."""
        return ":" not in self.address


class CommunicationTimeoutError(RuntimeFailure, TimeoutError):
    """An operation, as in `recv from actor:0`, reached its deadline after `seconds`.

    Attributes:
        picture: who waits for whom, in words, or None.
    """

    code = "timed-out"

    def __init__(
        self,
        operation: str,
        seconds: float,
        *,
        where: str | None = None,
        picture: str | None = None,
        help: str | None = None,
    ) -> None:
        super().__init__(f"`{operation}` did not finish in {seconds:g} s", where=where, why=picture, help=help)
        self.operation = operation
        self.seconds = seconds
        self.picture = picture


class DeadlockError(RuntimeFailure):
    """A set of processes (`members`, as in `actor:0`) wait for one another, and no other process can wake them.

    Attributes:
        picture: who waits for whom, in words.
    """

    code = "deadlock"

    def __init__(self, members: tuple[str, ...], picture: str, *, where: str | None = None) -> None:
        super().__init__(f"deadlock among {quoted(members)}", where=where, why=picture)
        self.members = members
        self.picture = picture


class ChannelError(RuntimeFailure):
    """Base of a channel's errors; `key` names the queue, None the whole channel."""

    def __init__(
        self,
        channel: str,
        message: str,
        *,
        key: object = None,
        where: str | None = None,
        why: str | None = None,
        help: str | None = None,
    ) -> None:
        super().__init__(message, where=where, why=why, help=help)
        self.channel = channel
        self.key = key


class ChannelClosed(ChannelError):  # noqa: N818 - named like queue.Full and queue.ShutDown
    """The channel is closed: a put was not accepted, or nothing is left to get."""


class PayloadError(RuntimeFailure):
    """An object cannot be sent: it does not pickle, or the receiving side cannot rebuild it."""


class MismatchError(RuntimeFailure, ValueError):
    """The two sides of a transfer do not fit: sizes, dtypes, or `send` against `recv_tensor`.

    Attributes:
        sent, expected: what was sent, as in `float32[4, 2]`, and what the receiver wanted.
    """

    def __init__(self, sent: str, expected: str, *, where: str | None = None, help: str | None = None) -> None:
        super().__init__(f"sent {sent}, the receiver expects {expected}", where=where, help=help)
        self.sent = sent
        self.expected = expected


class AuthenticationError(RuntimeFailure):
    """The other end of a connection does not belong to this cluster."""


class CancelledOperationError(RuntimeFailure):
    """The operation was cancelled before it finished."""


class RemoteError(RuntimeFailure):
    """Stand-in for an exception of another process whose type, `type_name`, cannot be rebuilt in this one."""

    def __init__(self, type_name: str, text: str, *, traceback: str | None = None, where: str | None = None) -> None:
        super().__init__(f"{type_name}: {text}" if text else type_name, where=where)
        self.type_name = type_name
        self.text = text
        self.traceback = traceback


class RunError(RLinfError):
    """A file of a run cannot be written, read or found."""


class CheckpointError(RunError):
    """A checkpoint cannot be written, or cannot be resumed from: it is missing, incomplete, or of another model."""

    code = "checkpoint"


class ClusterError(RLinfError):
    """The cluster is unreachable or incomplete, or cannot start what was requested."""

    code = "cluster"


class RayStartError(ClusterError):
    """Ray does not start on this machine, for example because the machine is too busy for Ray's time limits."""


class DeviceHeldError(ClusterError):
    """Another job holds an accelerator or a robot that this one needs."""
