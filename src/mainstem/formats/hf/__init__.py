"""Folders in Hugging Face's GPT-2 layout, read and written without `transformers`."""
