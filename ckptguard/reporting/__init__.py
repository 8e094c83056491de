"""Incidents: what happened, the likely causes, the report, and who is told."""
