"""What the command offers beside runs and diffs."""
