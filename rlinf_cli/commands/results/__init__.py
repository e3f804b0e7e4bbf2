"""Commands that look back at runs."""
