"""What a run would take on a TPU slice: memory and least time, from configurations alone."""
