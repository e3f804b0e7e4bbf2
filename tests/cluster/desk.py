"""The page of a person on a host of its own: it loads the page, and speaks to the arm's host as the page does.

python -m tests.cluster.desk HOST PORT TOKEN_FILE    # each line on stdin is what is held, as in `w`, or nothing
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
from typing import Final

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

SENDS: Final = 0.05  # seconds between two messages of the page


def tell(word: str, value: object = None) -> None:
    print(word, json.dumps(value), flush=True)


def main(host: str, port: str, token: str) -> None:
    page = http.client.HTTPConnection(host, int(port), timeout=20)
    page.request("GET", "/")
    tell("page", page.getresponse().status)
    origin = f"http://{host}:{port}"
    held: list[str] | None = None
    over = threading.Event()
    try:
        with connect(f"ws://{host}:{port}/operate", additional_headers={"Origin": origin}, open_timeout=20) as link:
            link.send(json.dumps({"token": token}))
            tell("answer", json.loads(link.recv(timeout=20)))

            def send() -> None:
                while not over.wait(SENDS):
                    message = {"enabled": held is not None, "keys": held or [], "pressed": [], "pad": None}
                    link.send(json.dumps(message))

            def read() -> None:
                with contextlib.suppress(ConnectionClosed):
                    for message in link:
                        if isinstance(message, str):
                            tell("state", json.loads(message)["state"])
                        else:
                            length = int.from_bytes(message[:4], "big")
                            head = json.loads(message[4 : 4 + length])
                            link.send(json.dumps({"shown": head["number"]}))
                            tell("picture", head)

            for job in (send, read):
                threading.Thread(target=job, daemon=True).start()
            for line in sys.stdin:
                held = line.split() or None
        over.set()
    except ConnectionClosed as error:
        tell("closed", error.rcvd.code if error.rcvd else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
