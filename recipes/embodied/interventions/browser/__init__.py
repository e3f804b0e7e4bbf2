"""A person at a web page: who steers, what their keys mean, the pictures that they see, and the server of the page."""
