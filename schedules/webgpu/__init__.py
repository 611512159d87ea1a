"""Kernels that only libraries for browsers have: what turns logits into a token there."""
