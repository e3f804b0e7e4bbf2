"""The transfer of messages over connections: sending, receiving, forwarding, streams to peers."""
