"""The protobuf messages of the Tinker SDK."""
