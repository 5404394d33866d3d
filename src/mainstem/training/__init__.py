"""Training: from a config and token files to a run folder that can be trusted."""
