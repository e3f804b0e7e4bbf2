"""Whole episodes of a job's workers, from which nobody learns: for recordings, evaluations and videos."""
