"""Texts of conversations: messages, chat templates, and tokens."""
