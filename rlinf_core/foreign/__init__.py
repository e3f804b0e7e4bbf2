"""Files, replies, connections and text of others. They are checked here before anything believes them."""
