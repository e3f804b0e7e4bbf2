"""The built-in engine: batched decoding with a KV cache."""
