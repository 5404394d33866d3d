"""Circuits: virtual weights, composition scores, OV and QK spectra, and attention patterns of heads.

All scores are computed from the weights, except `heads` and `contexts`, which run forward passes.
"""
