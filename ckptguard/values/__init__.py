"""The values: ids, manifests, verdicts, settings, incidents. No I/O, no clock, no decisions."""
