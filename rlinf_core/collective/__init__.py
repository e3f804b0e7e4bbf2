"""The data plane: how bytes move between the processes of a job. It knows nothing of Ray, workers or channels."""
