"""Two quantisations of one model: how far apart their texts are, and which tensors cost most."""
