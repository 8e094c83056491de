"""Scanning in separate processes."""
