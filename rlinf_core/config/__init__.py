"""The configuration file: text to positions to models. Nothing here imports ray or torch, or touches a machine."""
