"""Finds the nodes that a device gets wrong by whole runs, in which nobody looks at a node."""
