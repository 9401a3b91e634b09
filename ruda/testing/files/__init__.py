"""Layers, results and options in files."""
