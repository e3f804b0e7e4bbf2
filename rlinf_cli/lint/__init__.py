"""Findings that only commands tell: machines to bring up, and what is legal and looks like a mistake."""
