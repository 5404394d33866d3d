"""The model: one residual stream, the branches that read it and write to it, and the tap that lets one look."""
