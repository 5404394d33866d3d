"""Circuits: who can write to whom through the stream, how strongly, and what a head copies.

All of it by the weights alone, but for `heads` and `contexts`, which watch forward passes.
"""
