"""What a save holds, as bytes: state dicts, JSON, tensors."""
