"""Training code that recipes share: sharding, the optimizer, weights in flat buffers, checkpoints, seeds."""
