"""Configuration sections that all language recipes share."""
