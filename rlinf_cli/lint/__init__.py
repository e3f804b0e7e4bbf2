"""Findings that only commands report: machines to bring up, and legal settings that look like mistakes."""
