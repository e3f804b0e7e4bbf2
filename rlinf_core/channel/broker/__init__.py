"""The process that orders a channel's items."""
