"""Draft -> verify -> commit."""
