"""The content of a save as bytes: state dicts, JSON, tensors."""
