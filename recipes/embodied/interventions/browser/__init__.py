"""A person at a web page: the operator, the key bindings, the displayed images, and the server of the page."""
