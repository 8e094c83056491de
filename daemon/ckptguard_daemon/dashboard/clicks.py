"""What is read or done only when somebody clicks. All that is read shares one bound."""

from __future__ import annotations

from ckptguard_daemon.dashboard import actions, compare, heat, incident, one_checkpoint
from ckptguard_daemon.dashboard.reading import Clicks
from ckptguard_daemon.http.routes import Route, Served


def routes(served: Served) -> list[Route]:
    """Return the routes of these modules."""
    clicks = Clicks()
    return [
        route
        for module in (one_checkpoint, heat, compare, incident, actions)
        for route in module.routes(served, clicks)
    ]
