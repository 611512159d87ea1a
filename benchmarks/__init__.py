"""`everycast bench`: speed, memory and start, beside other engines."""
