"""A job in which large items go through a channel, for a place with little of /dev/shm. Prints what became of them.

python small_shm.py
"""

from __future__ import annotations

import json
import os

import numpy as np

from rlinf_core import Channel, Cluster, NodePlacementStrategy, Worker

MB = 1 << 20
SIZES = [1, 8, 32, 32, 32, 100]


class Actor(Worker):
    def put(self, channel: Channel) -> None:
        for number, size in enumerate(SIZES):
            channel.put(np.full(size * MB, number, np.uint8), weight=size, timeout=60)

    def get(self, channel: Channel) -> list[int]:
        """Return the megabytes of each item that arrived whole. All are kept until the last one is there."""
        items = [channel.get(timeout=60) for _ in SIZES]
        return [item.nbytes // MB for number, item in enumerate(items) if (item == number).all()]


def main() -> None:
    shm = os.statvfs("/dev/shm")
    with Cluster(num_nodes=1) as cluster:
        actors = Actor.create_group().launch(cluster, NodePlacementStrategy([0, 0]), name="actors")
        channel = Channel.create("large")
        getting = actors.execute_on(1).get(channel)
        actors.execute_on(0).put(channel).wait()
        whole = getting.wait()[0]
    print(json.dumps({"shm": shm.f_blocks * shm.f_frsize, "whole": whole}))


if __name__ == "__main__":
    main()
