"""The forecast of the memory of a job, and the memory that a run took."""
