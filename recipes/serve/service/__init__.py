"""The state of the service: tenants, sessions, models and samplers, requests in their order, and turns of workers."""
