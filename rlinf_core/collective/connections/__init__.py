"""Connections between processes: listeners, handshakes, pools."""
