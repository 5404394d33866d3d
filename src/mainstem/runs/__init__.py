"""Runs: what is on the disk: run folders, checkpoints, provenance, and the models that come with the package."""
