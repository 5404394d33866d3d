"""Kernels of our own beside the plain PyTorch forms that they must equal; chosen only where they are as fast."""
