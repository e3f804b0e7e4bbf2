"""Between hosts: the body follows its frame in the stream, straight from the memory of what is sent."""

from __future__ import annotations

from rlinf_core.collective.frame import ALIGNMENT
from rlinf_core.collective.received_message import private_memory
from rlinf_core.collective.transports.base import Bytes, EncodedBody, HostTransport, Message
from rlinf_core.collective.work import Work

_PADDING = bytes(ALIGNMENT)


class StreamTransport(HostTransport):
    """Copies only what does not lie in one piece on the host."""

    def load(self, message: Message, work: Work[object]) -> EncodedBody:
        body: list[Bytes] = []
        size = 0
        for part in message.parts:
            view = part.view()
            if view is None:
                view = private_memory(part.nbytes)
                part.copy_into(view)
            padding = -size % ALIGNMENT
            if padding:
                body.append(_PADDING[:padding])
            if part.nbytes:
                body.append(view)
            size += padding + part.nbytes
        return EncodedBody(body=body, body_size=size)
