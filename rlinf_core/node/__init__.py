"""The machine of this process: its processes and folders, and the clusters it belongs to. Imports nothing heavy."""
