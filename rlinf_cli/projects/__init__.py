"""Small working projects of a user's own, which `rlinf init` writes; their files are in `templates/`."""
