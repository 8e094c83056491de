"""Everything that ckptguard decides, as pure functions: what is known-good, what stays, when and how far to go back."""
