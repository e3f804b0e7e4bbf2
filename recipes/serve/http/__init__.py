"""The protocol of the Tinker SDK: routes, and messages on the wire."""
