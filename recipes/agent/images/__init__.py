"""Images of boxes: built, loaded, kept and removed without a daemon."""
