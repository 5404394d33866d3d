"""The residual stream of a model, opened: what is in it, who wrote it, who reads it, and what if it were not there."""
