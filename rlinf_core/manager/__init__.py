"""The manager of a job, one actor: membership, waits, ownership."""
