"""What every command of ours does on a terminal: its streams, columns, words for wrong usage, and its end."""
