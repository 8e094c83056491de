"""How the daemon is reached: its sockets, its connections and its routes."""
