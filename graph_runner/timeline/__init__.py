"""When the nodes of a run ran, on each device."""
