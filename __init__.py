"""everycast: compile one language model for every machine you own, and serve it."""

__version__ = "0.1.0"
