"""What the weights alone say: who can write to whom through the stream, how strongly, and what a head copies."""
