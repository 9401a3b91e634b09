"""Layers by description: drawn, run, judged, and made smaller where they fail."""
