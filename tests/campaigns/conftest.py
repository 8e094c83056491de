"""Daemons that end with their test."""

from support.daemon_fixtures import short_folder, start  # noqa: F401
