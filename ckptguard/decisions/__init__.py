"""Every decision of ckptguard as a pure function: what is known-good, what stays, when and how far to roll back."""
