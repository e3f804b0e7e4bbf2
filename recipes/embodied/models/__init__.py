"""Policies that act in environments, small ones among them; those of published weights are in `vla`."""
