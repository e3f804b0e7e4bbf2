"""Small working projects that `rlinf init` writes for the user; their files are in `templates/`."""
