"""Many requests at once: continuous batching, and files of requests in and out."""
