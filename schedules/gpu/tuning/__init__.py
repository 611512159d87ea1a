"""Search of the linear kernels' parameters on a GPU, by measurement (docs/tuning.md)."""
