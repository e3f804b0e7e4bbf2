"""What a person sees of a run while it goes: a live view on a terminal, plain lines elsewhere."""
