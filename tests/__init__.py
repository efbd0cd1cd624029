"""The test suite; a package, so that tests can share helpers as `tests.<module>`."""
