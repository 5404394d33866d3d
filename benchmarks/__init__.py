"""Speed as ratios within one run: mainstem, floors that no program can be faster than, and other programs."""
