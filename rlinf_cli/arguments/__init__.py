"""The arguments and options that several commands share, and their completion."""
