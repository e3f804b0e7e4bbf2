"""What others wrote or send: files, replies, connections, text. It is checked here before anything believes it."""
