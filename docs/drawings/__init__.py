"""The drawings of docs/concepts, one module each."""
