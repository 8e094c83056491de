"""What things are: ids, manifests, verdicts, schemas, settings, incidents. No I/O, no clock, no decisions."""
