"""Robots over the network: the protocol of an arm's controller, its client, and a controller with a simulated arm."""
