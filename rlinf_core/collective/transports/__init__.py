"""How the large parts of a message reach the other side: one file per way."""
