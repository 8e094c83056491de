"""Which kind of checkpoints a guard saves, and of what."""

from __future__ import annotations

from ckptguard.records.run import Run
from ckptguard.training.content.training_parts import TrainingParts
from ckptguard.training.options import Guarded
from ckptguard.training.ranks import GlooRanks, Ranks
from ckptguard.training.saving.stores import OwnStore, Store, UserFiles, UserStore
from ckptguard.values.settings import Settings


def parts_of(given: Guarded) -> TrainingParts:
    """The objects that are saved and put back."""
    return TrainingParts(
        model=given["model"],
        optimizer=given.get("optimizer"),
        scheduler=given.get("scheduler"),
        scaler=given.get("scaler"),
        strict=given.get("strict", True),
    )


def store_for(run: Run, settings: Settings, parts: TrainingParts, ranks: Ranks, given: Guarded) -> Store:
    """The user's own files where there is a `save` and a `load`, else our own layout."""
    save, load = given.get("save"), given.get("load")
    if save is not None and load is not None:
        files = UserFiles(save=save, load=load, name=given.get("name", "step-{step}.pt"))
        if ranks.size == 1:
            return UserStore(run, files, settings)
        from ckptguard.training.sharded.collective_store import CollectiveStore  # only several ranks pay for it

        return CollectiveStore(run, files, settings, ranks)
    if isinstance(ranks, GlooRanks):
        from ckptguard.training.sharded.sharded_store import ShardedStore  # only several ranks pay for it

        return ShardedStore(run, parts, ranks, settings)
    return OwnStore(run, parts, settings)
