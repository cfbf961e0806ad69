"""One module a step, in order of its number."""
