"""Kernels of a speculative step: jax only, each with a plain-JAX reference beside it."""
