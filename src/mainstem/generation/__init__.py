"""Text generation: KV cache, sampling, incremental UTF-8 decoding, and the compiled decoder."""
