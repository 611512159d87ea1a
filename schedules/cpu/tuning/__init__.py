"""Search of the linear kernels' parameters by measurement (docs/tuning.md)."""
