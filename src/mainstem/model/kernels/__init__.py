"""Faster implementations of parts of the model: each equals a plain PyTorch form, and is used where it is no slower."""
