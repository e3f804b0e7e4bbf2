"""The section types that recipes share, and shared value types."""
