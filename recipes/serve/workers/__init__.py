"""The workers of the service: they train adapters of one model, and sample from snapshots of them."""
