"""Causal language models, loaded or built, as policies and critics over packed rows."""
