"""How results look: plain strings in, plain strings out."""
