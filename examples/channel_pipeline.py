"""Producers and consumers that share a channel: `python examples/channel_pipeline.py`.

Two workers put sequences of unlike length. Two others take batches of equal size in tokens, as a trainer does.
"""

from __future__ import annotations

import random

from rlinf_core import Channel, ChannelClosed, Cluster, NodePlacementStrategy, Worker

TOKENS = 64  # of a batch, at least
SEQUENCES = 50  # of a producer


class Generator(Worker):
    """A producer: it stands for a model that answers prompts."""

    def generate(self) -> int:
        """Put sequences, and return how many tokens they have."""
        sequences = self.connect_channel("sequences")
        lengths = random.Random(self.rank).choices(range(1, 33), k=SEQUENCES)
        for length in lengths:
            sequences.put([self.rank] * length, weight=length)  # waits while the channel is full
        return sum(lengths)


class Trainer(Worker):
    """A consumer: it stands for a process that trains on what comes."""

    def train(self) -> list[int]:
        """Take batches until there is nothing more, and return the tokens of each."""
        sequences = self.connect_channel("sequences")
        batches: list[int] = []
        try:
            while True:
                batches.append(sum(len(sequence) for sequence in sequences.get_batch(batch_weight=TOKENS)))
        except ChannelClosed:  # closed, and empty
            return batches


def main(cluster: Cluster) -> tuple[int, list[int]]:
    """Run the pipeline, and return the tokens that were put and the tokens of each batch that was taken."""
    channel = Channel.create("sequences", maxsize=16)
    generators = Generator.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="generators")
    trainers = Trainer.create_group().launch(cluster, NodePlacementStrategy([0] * 2), name="trainers")
    training = trainers.train()  # does not wait: both groups work at once
    tokens = sum(generators.generate().wait())
    channel.close()
    batches = [batch for of_rank in training.wait() for batch in of_rank]
    generators.shutdown()
    trainers.shutdown()
    return tokens, batches


if __name__ == "__main__":
    with Cluster(num_nodes=1) as this_machine:
        put, taken = main(this_machine)
    print(f"{put} tokens were put, {sum(taken)} taken in {len(taken)} batches")
