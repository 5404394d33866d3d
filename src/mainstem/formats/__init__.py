"""In and out: models and tokenizers in the layouts of other programs, and `load`, which opens any RUN."""
