"""``python -m ckptguard`` is the command ``ckptguard``."""

from __future__ import annotations

from ckptguard.cli import main

if __name__ == "__main__":
    main()
