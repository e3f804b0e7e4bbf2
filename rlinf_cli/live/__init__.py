"""Views of a run while it goes on: a live view on a terminal, plain lines elsewhere."""
