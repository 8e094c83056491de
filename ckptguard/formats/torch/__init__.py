"""torch's files: zip archives, legacy streams and bare pickles."""
