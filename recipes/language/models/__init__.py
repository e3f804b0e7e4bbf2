"""Causal language models: loaded or built, as policies and as values, over packed rows."""
