"""Messages: what is sent, and how it becomes bytes and tensors again."""
