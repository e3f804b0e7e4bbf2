"""The data plane: moves bytes between the processes of a job. It does not depend on Ray, workers or channels."""
