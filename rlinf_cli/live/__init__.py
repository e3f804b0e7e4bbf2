"""Views of a running job: a live view on a terminal, plain lines elsewhere."""
