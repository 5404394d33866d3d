"""What several verbs share: parsing, the screen, signals, opening a run."""
