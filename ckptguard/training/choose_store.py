"""Which kind of checkpoints a guard saves."""

from __future__ import annotations

from collections.abc import Callable

from ckptguard.records.run import Run
from ckptguard.training.content.training_parts import Parts
from ckptguard.training.ranks import GlooRanks, Ranks
from ckptguard.training.saving.stores import OwnStore, Store, UserStore
from ckptguard.values.settings import Settings


def store_for(
    run: Run,
    parts: Parts,
    ranks: Ranks,
    *,
    save: Callable[[str, int], object] | None,
    load: Callable[[str], object] | None,
    name: str,
    settings: Settings,
) -> Store:
    """The user's own files where there is a `save` and a `load`, else our own layout."""
    allow = settings.allow_nonfinite
    if save is not None and load is not None:
        if ranks.size == 1:
            return UserStore(run, save, load, name, wait_for_room=settings.on_full == "wait")
        from ckptguard.training.sharded.collective_store import CollectiveStore  # only several ranks pay for it

        return CollectiveStore(run, save, load, name, ranks)
    if isinstance(ranks, GlooRanks):
        from ckptguard.training.sharded.sharded_store import ShardedStore  # only several ranks pay for it

        return ShardedStore(run, parts, ranks, allow=allow)
    return OwnStore(run, parts, allow=allow, wait_for_room=settings.on_full == "wait")
