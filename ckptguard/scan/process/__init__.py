"""Scanning in processes of their own."""
