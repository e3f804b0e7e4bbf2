"""The supervision of a job: its processes, their deaths, their waits for each other, and deadlocks."""
