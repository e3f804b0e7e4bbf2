"""Scoring of answers by a judge model in separate workers, and the choice of a job's scorer."""
