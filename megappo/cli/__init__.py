"""Commands: the composition root. Builds objects from a RunConfig; nothing else builds objects from names."""
