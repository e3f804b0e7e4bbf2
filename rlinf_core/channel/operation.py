"""The caller's side of one operation on a channel, and the checks of its arguments."""

from __future__ import annotations

import asyncio
import math
import operator
import time
from ast import literal_eval
from asyncio import QueueEmpty, QueueFull
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, cast

from rlinf_core.channel import wire
from rlinf_core.channel.queue_state import Reason
from rlinf_core.channel.wire import ClientMailbox
from rlinf_core.collective.transfer.received_messages import ReceivedMessage
from rlinf_core.collective.work import WaitTable, Work
from rlinf_core.errors import CancelledOperationError, ChannelClosed, ChannelError, CommunicationTimeoutError
from rlinf_core.suggest import short_repr
from rlinf_core.waiting import NO_TEXT, OperationKind, plain_seconds

Key: TypeAlias = "str | int | float | bytes | tuple[Key, ...] | None"
"""The name of a queue within a channel: any hashable plain value."""


def amount(value: object) -> float | None:
    """Return an argument as a finite number >= 0; None if it is not one.

    A NumPy scalar and a tensor of one element count as numbers; text and `10**400` do not.
    """
    try:
        number = value if type(value) is int or type(value) is float else _number(value)
        return number if number >= 0 and float(number) < math.inf else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # For several elements or a complex value, each library raises a different error.
        return None


def _number(value: object) -> float:
    if isinstance(value, str | bytes | bytearray | complex):
        raise TypeError
    return float(value)  # pyright: ignore[reportArgumentType] - who has no `__float__` raises


def checked_weight(weight: float) -> float:
    """Return the weight of an item as a plain number.

    Raises:
        ValueError: it is not a finite number >= 0.
    """
    number = amount(weight)
    if number is None:
        raise ValueError(f"`weight` is {short_repr(weight)}, expected a finite number from 0")
    return number


def checked_batch_weight(weight: float) -> float:
    """Return the weight of a batch as a plain number.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    number = amount(weight)
    if not number:
        raise ValueError(f"`batch_weight` is {short_repr(weight)}, expected a finite number above 0")
    return number


def checked_timeout(timeout: float | None) -> float | None:
    """Return a timeout in seconds, or None for the default.

    Raises:
        ValueError: it is not a finite number >= 0, or it is a tensor.
    """
    return None if timeout is None else plain_seconds(timeout)


def checked_bound(maxsize: int) -> int:
    """Return the number of items that each key may hold, as an int.

    Raises:
        ValueError: it is not an integer >= 0.
    """
    number = amount(maxsize)
    if number is None or number != int(number):
        raise ValueError(f"`maxsize` is {short_repr(maxsize)}, expected an integer >= 0 (0 means no bound)")
    return int(number)


def checked_key(key: Key) -> str:
    """Return the encoded form of a key, as text. Equal keys, such as 1 and 1.0, have the same form.

    Raises:
        TypeError: it is not a plain value: another process could not tell whether two such keys are equal.
        ValueError: it is text that cannot be encoded, or that begins like the encoded form of a key that is not text.
    """
    if not isinstance(key, str):
        return f"{NO_TEXT}{_canonical(key)!r}"
    if key.startswith(NO_TEXT):
        raise ValueError(f"a key must not begin with the invisible character {NO_TEXT!r}")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a key is text, and {short_repr(key)} holds half a character") from None
    return key


def key_of(text: str) -> Key:
    """Return the key whose encoded form is `text`, see `checked_key`."""
    return cast("Key", literal_eval(text[1:])) if text.startswith(NO_TEXT) else text


def _canonical(key: object) -> object:
    """Return an equal plain value, such that equal keys yield the same `repr`."""
    if key is None:
        return key
    # As plain text and bytes: subclasses such as NumPy's and those of enums have another `repr`.
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, bytes):
        return bytes(key)
    if isinstance(key, tuple):
        return tuple(_canonical(item) for item in cast("tuple[object, ...]", key))
    try:
        return operator.index(key)  # pyright: ignore[reportArgumentType] - whatever is a whole number, as numpy's
    except TypeError:
        pass
    if isinstance(key, float) and math.isfinite(key):
        return int(key) if key.is_integer() else float(key)
    raise TypeError(f"a key is text, a number, None, bytes or a tuple of such, not {short_repr(key)}")


class ChannelFull(ChannelError, QueueFull):  # noqa: N818 - named like queue.Full
    """An error of a non-blocking put whose queue is full."""


class ChannelEmpty(ChannelError, QueueEmpty):  # noqa: N818 - named like queue.Empty
    """An error of a non-blocking get whose queue is empty."""


T = TypeVar("T")
# A packed item, a received message, or an item of a local channel.
Piece: TypeAlias = object
# Makes the result of an operation from its pieces.
Decode: TypeAlias = Callable[[Sequence[Piece]], Any]
# The seconds after its deadline for which an operation still waits for the channel's reply.
_GRACE = 5.0


class ChannelOperation(Work[T], Generic[T]):
    """An issued put, get or query. Items are unpickled on the first read of the result.

    Attributes:
        op_id: its id, unique in this process.
        pieces: the received items of its result.
        missing: the number of items of its result still to be received; -1 before the first.
        sending: its background send, if any.
        mailbox: the mailbox of its answer slot, if it has one.
        polls: whether its caller set a timeout of 0: then the channel decides at once, and its reply has the time of a
            first contact.
    """

    __slots__ = (
        "_claimed",
        "_given_up",
        "_late",
        "_withdraw",
        "mailbox",
        "missing",
        "op_id",
        "pieces",
        "polls",
        "sending",
    )

    def __init__(
        self,
        op_id: int,
        kind: OperationKind,
        channel: str,
        key: str,
        seconds: float,
        decode: Callable[[Sequence[Piece]], T] | None,
        withdraw: Callable[[ChannelOperation[Any]], bool],
        waits: WaitTable | None = None,
        *,
        detached: bool = False,
        mailbox: ClientMailbox | None = None,
    ) -> None:
        """`withdraw` cancels the operation at the channel, and returns whether the channel will report its outcome."""
        super().__init__(kind, channel, seconds, waits, key=key, detached=detached, decode=decode)
        self.op_id = op_id
        self.pieces: list[Piece] = []
        self.missing = -1
        self.sending: Work[object] | None = None
        self.mailbox = mailbox
        self.polls = False
        self._claimed = False
        self._given_up = False
        self._late: CommunicationTimeoutError | None = None
        self._withdraw = withdraw

    @property
    def packed_key(self) -> bytes:
        return cast("str", self.key).encode()

    # Replies of the channel

    def claim(self) -> bool:
        """Claim the result before its acknowledgement; return False if it is no longer wanted."""
        if self._decoding is None:
            return True
        with self._decoding:
            self._claimed = not self._given_up
            return self._claimed

    def arrive(self, encoded: object) -> bool:
        self._end_in_slot()
        # `encoded` holds all of them.
        self.pieces = []
        return super().arrive(encoded)

    def finish(self, value: T) -> bool:
        self._end_in_slot()
        return super().finish(value)

    def add(self, place: int, total: int, pieces: Sequence[Piece]) -> bool:
        """Add received items; return whether all have arrived."""
        if self.missing < 0:
            self.missing = total
            self.pieces = [None] * total
        self.pieces[place : place + len(pieces)] = pieces
        self.missing -= len(pieces)
        return self.missing == 0

    def refuse(self, reason: Reason, why: str) -> bool:
        """Fail with the channel's reason for the refusal."""
        if self._was_accepted():
            return self.finish(cast("T", None))
        self._end_in_slot()
        self._drop_pieces()
        return self._settle(None, self._refusal(reason, why))

    def _was_accepted(self) -> bool:
        """Return whether it is a put whose acceptance is still unread in its slot."""
        return self.kind is OperationKind.PUT and self.mailbox is not None and self.mailbox.answered(self.op_id)

    def _end_in_slot(self) -> None:
        if self.mailbox is not None:
            self.mailbox.channel_done(self.op_id)

    def _refusal(self, reason: Reason, why: str) -> Exception:
        channel, key = self.target, key_of(cast("str", self.key))
        of_key = f", key `{key}`" if key != wire.DEFAULT_KEY else ""
        if reason is Reason.CLOSED:
            done = "the item was not accepted" if self.kind is OperationKind.PUT else "and nothing is left in it"
            return ChannelClosed(channel, f"channel `{channel}`{of_key} is closed, {done}", key=key)
        if self.polls and reason in (Reason.FULL, Reason.EMPTY):
            return CommunicationTimeoutError(self.title, 0, picture=why or f"the queue is {reason}", help=_hint(why))
        if reason is Reason.FULL:
            return ChannelFull(channel, f"channel `{channel}`{of_key} is full", key=key)
        if reason is Reason.EMPTY:
            return ChannelEmpty(channel, f"channel `{channel}`{of_key} is empty", key=key, why=why or None)
        picture = self._late.picture if self._late is not None else None
        words = "; ".join(part for part in (why, picture) if part)
        return CommunicationTimeoutError(self.title, self.seconds, picture=words or None, help=_hint(why))

    def fail(self, error: BaseException) -> bool:
        if self._was_accepted():
            self.finish(cast("T", None))
            # The channel forgets a cancelled operation.
            self._withdraw(self)
            return False
        if self._decoding is not None:
            # An acknowledged item cannot go to another consumer, so the operation must not fail.
            with self._decoding:
                if self._claimed:
                    self._end_in_slot()
                    return False
                self._given_up = True
        failed = super().fail(error)
        if failed:
            self._withdraw(self)
            if self.sending is not None:
                self.sending.fail(error)
            self._drop_pieces()
            # After the withdrawal: a reply to this operation must not reach the slot's next user.
            self._end_in_slot()
        return failed

    def _drop_pieces(self) -> None:
        """Drop the received items of an operation that has failed."""
        pieces, self.pieces = self.pieces, []
        let_go(pieces)

    # Calls by its owner

    def wait(self, timeout: float | None = None) -> T:
        if not self._done:
            timeout = checked_timeout(timeout)
            if timeout is not None and time.monotonic() + timeout < self.deadline:
                return super().wait(timeout)
            try:
                if not self.wait_until(self.deadline, self.seconds, extended=True):
                    self.expire(self._too_late(self.seconds))
            except BaseException:
                # Interrupted: no caller will read its result.
                self.cancel()
                raise
        return self.result()

    async def async_wait(self) -> T:
        try:
            return await super().async_wait()
        except CommunicationTimeoutError as late:
            if not self._done:
                await asyncio.to_thread(self.expire, late)
            return self.result()
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the operation, since no caller waits for it any more."""
        if not self._done:
            self.fail(CancelledOperationError(f"`{self.title}` was interrupted"))

    def mark_dropped(self) -> None:
        """Record that its handle was dropped: an item that arrives from now on goes to another consumer.

        Takes no lock, so destructors may call it. `cancel` must follow.
        """
        self._given_up = True

    def discard(self) -> bool:
        """Drop an unread result; return whether there was one."""
        if self._decoding is None or not self._done or self._error is not None:
            return False
        with self._decoding:
            if self._decode is not None:
                let_go(cast("Sequence[Piece]", self._value))
                self._value = self._decode = None
        return True

    def expire(self, late: CommunicationTimeoutError, *, wait: bool = True) -> None:
        """Expire the operation at its deadline: cancel it at the channel, and fail with the channel's reason.

        A result that arrives meanwhile counts. With `wait`, wait for the channel's reply; without, the operation ends
        when the reply arrives, or at once if the channel is unreachable.
        """
        self._late = late
        if not wait:
            if not self._withdraw(self):
                self.fail(late)
            return
        if not self._done and self._withdraw(self):
            self.wait_until(time.monotonic() + _GRACE)
        if not self._done and not self.fail(late):
            # Its result is arriving.
            self.wait_until(time.monotonic() + _GRACE)


def one_item(pieces: Sequence[Piece]) -> object:
    """Return the item of a get."""
    return _object(pieces[0])


def all_items(pieces: Sequence[Piece]) -> list[object]:
    """Return the items of a batch."""
    return [_object(piece) for piece in pieces]


def answer(pieces: Sequence[Piece]) -> object:
    """Return the answer to a question."""
    return wire.unpack(cast("bytes", pieces[0]))


def let_go(pieces: Sequence[Piece]) -> None:
    """Free private copies of unread items; the channel releases those in shared memory."""
    for piece in pieces:
        if isinstance(piece, ReceivedMessage) and piece.frame.place is None:
            piece.release()


def _object(piece: Piece) -> object:
    return piece.load() if isinstance(piece, ReceivedMessage) else wire.unpack_item(cast("bytes", piece))


def _hint(why: str) -> str | None:
    if "weight 0" in why:
        return "put the items with a weight, or take them one by one with `get`"
    return None
