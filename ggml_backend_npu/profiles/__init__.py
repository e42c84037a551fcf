"""Device generations: which nodes each takes."""
