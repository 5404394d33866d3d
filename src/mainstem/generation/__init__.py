"""From a model to text: a cache of keys and values, a choice among logits, and text that never cuts a character."""
