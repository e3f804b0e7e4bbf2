"""Metrics and spans of a run for services and for others' tools; each is imported only if it is named."""
