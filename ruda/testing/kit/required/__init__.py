"""The required operations, one by one, with every documented keyword."""
