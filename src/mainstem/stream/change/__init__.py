"""What if it were otherwise: ablating, patching and steering, and what a metric makes of it."""
