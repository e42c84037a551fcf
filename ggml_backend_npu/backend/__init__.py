"""A backend: its ops, options, fusions and plans.

NO_KERNEL  why a backend or a device does not take a node that it has no kernel for
"""

NO_KERNEL = "no kernel"
