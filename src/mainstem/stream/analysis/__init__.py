"""What the record of a pass shows: each depth as if it were the last, who writes and reads what, a token in numbers."""
