"""Rules between configuration values, and checks of machines and folders before a run."""
