"""Lossless speculative decoding and its measurement."""
