"""Kernels of all GPU targets, written once over `GpuLimits`."""
