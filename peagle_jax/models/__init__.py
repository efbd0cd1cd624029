"""Networks as pure functions of (params, inputs, cache)."""
