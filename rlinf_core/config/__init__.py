"""The configuration file: text to positions to models, with every finding at its place.

Nothing here imports ray or torch, and nothing starts a process or opens a socket.
"""
