"""Libraries for browsers, which WebLLM loads."""
