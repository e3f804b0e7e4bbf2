"""Advantages, returns, losses and divergences: functions of torch tensors, independent of processes."""
