"""Four workers, called as one group: `python examples/hello_workers.py`."""

from __future__ import annotations

from rlinf_core import Cluster, NodePlacementStrategy, Worker


class Greeter(Worker):
    """A worker is an ordinary class; each of its objects lives in a process of its own."""

    def greet(self, name: str) -> str:
        """Return a greeting that says which rank it is from."""
        return f"Hello, {name}, from rank {self.rank} of {self.world_size}"


def main(cluster: Cluster) -> list[str]:
    """Launch four workers on node 0, call all of them at once, and return what they answer."""
    greeters = Greeter.create_group().launch(cluster, NodePlacementStrategy([0] * 4), name="greeters")
    answers = greeters.greet("world").wait()  # a call returns a handle; `wait` gives the results by rank
    greeters.shutdown()
    return answers


if __name__ == "__main__":
    with Cluster(num_nodes=1) as this_machine:  # a Ray of its own, which ends with this block
        print("\n".join(main(this_machine)))
