"""Workers and groups of them."""
