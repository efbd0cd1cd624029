"""Training drafters on a target's own answers."""
