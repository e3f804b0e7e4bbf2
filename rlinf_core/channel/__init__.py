"""Channels: weighted queues between many producers and many consumers."""
