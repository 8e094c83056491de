"""Saves that several ranks write together."""
