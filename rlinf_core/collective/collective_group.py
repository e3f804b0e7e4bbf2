"""Point-to-point transfer and broadcast among worker addresses, on one host or several."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlinf_core.address import WorkerAddress
from rlinf_core.collective.endpoint import Endpoint
from rlinf_core.collective.endpoint_info import Resolver
from rlinf_core.collective.frame import Flag
from rlinf_core.collective.message import Message
from rlinf_core.collective.torch_payload import TensorTarget, tensor_parts
from rlinf_core.collective.transfer.peer_stream import PeerStream
from rlinf_core.collective.transfer.received_messages import PostedReceive
from rlinf_core.collective.work import Work
from rlinf_core.errors import CommunicationTimeoutError
from rlinf_core.process import activity
from rlinf_core.waiting import OperationKind

if TYPE_CHECKING:
    import numpy as np
    import torch

    Tensor = torch.Tensor | np.ndarray[Any, Any]


# The time limit for a receive to get the message that arrived just as the receive timed out.
_SECONDS_TO_ARRIVE = 5.0


class CollectiveGroup:
    """A set of worker addresses, one of which is in this process.

    All operations from one address to another match in the order of issue, synchronous or not.

    Every operation takes a `timeout` in seconds, by default `RLINF_TIMEOUT`, and raises

    * `CommunicationTimeoutError` when the timeout passes,
    * `WorkerDiedError` when the peer is gone,
    * `UnknownGroupError` or `PeerNotFoundError` when there is no such peer, on first contact,
    * `MismatchError` when the operations of the two sides do not fit each other,
    * `PayloadError` when the object does not pickle, or cannot be rebuilt on the receiving side.
    """

    def __init__(
        self, endpoint: Endpoint, me: WorkerAddress, members: Sequence[WorkerAddress], resolver: Resolver
    ) -> None:
        """`me` is the address in this process; `members` are all addresses, with or without `me`."""
        self._endpoint = endpoint
        self.me = me
        self.members = tuple(sorted({me, *members}))
        self._resolver = resolver
        self._streams: dict[WorkerAddress, PeerStream] = {}

    # Objects

    def send(
        self, obj: object, dst: WorkerAddress, *, async_op: bool = False, timeout: float | None = None
    ) -> Work[None] | None:
        """Send any picklable object; pickle does not copy the tensors in it, at any depth.

        Returns when the object may be modified, which may be before it is received. Tensors arrive detached.

        With `async_op`, returns a handle at once; the object must not change before its `wait`.
        """
        stream = self._stream(dst)
        seconds, message = self._endpoint.seconds(timeout), self._endpoint.message(obj)
        work: Work[Any] = Work(OperationKind.SEND, stream.peer, seconds, self._endpoint.waits, detached=async_op)
        if async_op:
            self._endpoint.send_async(stream, message, work)
            return work
        self._endpoint.send(stream, message, work)
        if activity.recorder is not None:
            # This handle is never settled, so it does not record itself.
            activity.recorder.add(activity.TRANSFER, work.title, work.since, time.monotonic())
        return None

    def recv(self, src: WorkerAddress, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Return the next object that `src` sends here, or with `async_op` a handle for it."""
        return self._receive(OperationKind.RECV, src, async_op, timeout)

    # One tensor

    def send_tensor(
        self, tensor: Tensor, dst: WorkerAddress, *, async_op: bool = False, timeout: float | None = None
    ) -> Work[None] | None:
        """Send one tensor or array to a `recv_tensor` that has a buffer of its size and dtype.

        Returns when the tensor may be modified, which may be before it is received. On a mismatch the receiver raises
        `MismatchError`, and so does `settle` here; later operations are not affected. With `async_op`, the handle
        finishes when the receiver has taken the tensor, and raises a mismatch itself.

        A sparse, quantized or object tensor is a `PayloadError`: use `send`.
        """
        stream = self._stream(dst)
        seconds = self._endpoint.seconds(timeout)
        words, part = tensor_parts(tensor)
        waits = self._endpoint.waits
        fitted: Work[None] = Work(OperationKind.SEND_TENSOR, stream.peer, seconds, waits, detached=async_op)
        message = Message(words, [part], Flag.TENSOR, acknowledgement=fitted)
        # Separate from `fitted`: otherwise a mismatch reported before the send ends would be raised twice.
        sent: Work[object] = Work(OperationKind.SEND_TENSOR, stream.peer, seconds, waits)

        def hand_down() -> None:
            error = sent.exception()
            if error is not None:
                fitted.fail(error)

        sent.add_done_callback(hand_down)
        if not async_op:
            self._endpoint.send(stream, message, sent)
            return None
        self._endpoint.send_async(stream, message, sent)
        return fitted

    def recv_tensor(
        self, tensor: Tensor, src: WorkerAddress, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Fill `tensor` in place with the next tensor that `src` sends here, and return it (or a handle).

        A read-only or expanded buffer is a `PayloadError`, and consumes no message. With `async_op` the buffer is
        in use until the handle has finished: a wait that times out does not end the receive.
        """
        return self._receive(OperationKind.RECV_TENSOR, src, async_op, timeout, TensorTarget(tensor))

    # All members

    def broadcast(
        self, obj: object, src: WorkerAddress, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Send the object of `src` to every member, and return it; the `obj` of other members is ignored.

        Members on one host share one copy of its tensors until they write to them.

        Raises:
            ExceptionGroup: the sends to several members failed; if one failed, its own error is raised.
        """
        if src != self.me:
            return self.recv(src, async_op=async_op, timeout=timeout)
        streams = [self._stream(member) for member in self.members if member != self.me]
        message = self._endpoint.message(obj)
        names = ", ".join(stream.peer for stream in streams)
        done: Work[object] = self._endpoint.work(OperationKind.BROADCAST, names, timeout, detached=async_op)
        works = [self._endpoint.work(OperationKind.BROADCAST, stream.peer, timeout) for stream in streams]
        if async_op:
            threading.Thread(
                target=self._broadcast, args=(streams, message, works, obj, done), name="rlinf-broadcast", daemon=True
            ).start()
            return done
        self._broadcast(streams, message, works, obj, done)
        return done.result()

    # Acknowledgements

    def settle(self, timeout: float) -> bool:
        """Wait until receives took all tensors of `send_tensor`, at most `timeout` seconds; return whether they did.

        Raises:
            MismatchError: a tensor does not fit its receiver's buffer.
        """
        deadline = time.monotonic() + timeout
        for stream in list(self._streams.values()):
            for work in stream.unacknowledged_works():
                if not work.wait_until(deadline):
                    return False
            for error in stream.take_mismatches():
                raise error
        return True

    # Parts

    def _stream(self, peer: WorkerAddress) -> PeerStream:
        stream = self._streams.get(peer)
        if stream is None:
            if peer not in self.members:
                raise ValueError(f"`{peer}` is not a member of this group")
            stream = self._streams[peer] = self._endpoint.stream(self.me, peer, self._resolver)
        return stream

    def _receive(
        self,
        kind: OperationKind,
        src: WorkerAddress,
        async_op: bool,
        timeout: float | None,
        target: TensorTarget | None = None,
    ) -> object:
        stream = self._stream(src)
        seconds, waits = self._endpoint.seconds(timeout), self._endpoint.waits
        posted = PostedReceive(kind, stream.peer, seconds, waits, detached=async_op, target=target)
        self._endpoint.receive(stream, posted)
        if async_op:
            return posted
        try:
            return posted.wait()
        except CommunicationTimeoutError as error:
            if posted.fail(error):
                raise
            # This receive got its message at the last moment, so no other receive can get that message.
            return posted.wait(_SECONDS_TO_ARRIVE)
        except BaseException as error:
            posted.fail(error)
            raise

    def _broadcast(
        self,
        streams: Sequence[PeerStream],
        message: Message,
        works: Sequence[Work[object]],
        obj: object,
        done: Work[object],
    ) -> None:
        try:
            self._endpoint.broadcast(streams, message, works)
        except Exception as error:  # noqa: BLE001 - it is the outcome of the operation
            done.fail(error)
            return
        errors: list[Exception] = []
        for work in works:
            error = work.exception() if work.settled else CommunicationTimeoutError(work.title, work.seconds)
            if isinstance(error, Exception):
                errors.append(error)
        if not errors:
            done.finish(obj)
        elif len(errors) == 1:
            done.fail(errors[0])
        else:
            done.fail(ExceptionGroup(f"the broadcast failed for {len(errors)} of {len(works)} members", errors))
