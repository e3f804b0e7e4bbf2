"""Stacks of processes of this machine: of this one, and of others, whatever they do."""
