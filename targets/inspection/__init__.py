"""What is inside compiled libraries, by the tools of each target. Neither TVM nor a device is
needed."""
