"""The state of the service: tenants, sessions, models, samplers, ordered requests, and turns of workers."""
