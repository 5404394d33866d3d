"""Text: its tokenizers, its corpora, and the token files that training reads. Imports no torch."""
