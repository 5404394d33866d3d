"""Hypothesis without a clock: other work on the machine is no fault of a test."""

from hypothesis import settings

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
