"""Commands that use trained policies."""
