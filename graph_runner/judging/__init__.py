"""Which differences between two results are right."""
