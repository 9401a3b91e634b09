"""The contract, section by section, and whole layers."""
