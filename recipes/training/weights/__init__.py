"""The transfer of weights from actors to rollout workers."""
