"""Speed as ratios within one run: ours, the plain forward pass, the peers."""
