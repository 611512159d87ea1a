"""Vulkan: kernels to GLSL, GLSL to SPIR-V, and the module that a library carries them in."""
