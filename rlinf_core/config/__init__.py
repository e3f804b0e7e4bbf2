"""The configuration file: from text with positions to models. Imports neither ray nor torch, and connects to no
machine."""
