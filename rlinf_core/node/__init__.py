"""The machine a process is on: its processes and folders, the clusters that it is a node of. Nothing heavy."""
