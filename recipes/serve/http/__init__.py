"""The routes of the Tinker SDK."""
