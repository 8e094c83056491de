"""The plan of a rollback against what must be so after it, told from the values alone."""

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptguard.decisions.rollback_plan import (
    Content,
    Pointer,
    SeriesNow,
    counts_further,
    folders_of_training,
    is_newer,
    next_save,
    plan_rollback,
)
from ckptguard.values.ids import CheckpointId, folder_of

NUMBERED, FIXED = "net-#.pt", ("last.pt", "best.pt", "weights/latest.pt", "weights/deep/ema.pt")


def numbered(step, *, good=True, in_place=True, shape="full"):
    """A numbered checkpoint, saved at its step."""
    return Content(
        id=CheckpointId(NUMBERED, step, 1),
        path=f"net-{step}.pt",
        in_place=in_place,
        good=good,
        counters={"global_step": step},
        has_optimizer=shape == "full",
        saved_at=step * 1000,
        shape=shape,
    )


def fixed(name, generation, update, *, good, in_place, shape, counts):
    """A content of a fixed name, which was saved just after that update."""
    return Content(
        id=CheckpointId(name, None, generation),
        path=name,
        in_place=in_place,
        good=good,
        counters={"global_step": update} if counts else {},
        has_optimizer=shape == "full",
        saved_at=update * 1000 + 1,
        shape=shape,
    )


@st.composite
def places(draw):
    """The series of one training after ten updates, and the known-good to go back to."""
    steps = sorted(draw(st.sets(st.integers(1, 10), min_size=1)))
    good = draw(st.sets(st.sampled_from(steps), min_size=1))
    gone = draw(st.sets(st.sampled_from(steps)))
    target = draw(st.sampled_from(sorted(good)))
    all_of = {n: numbered(n, good=n in good, in_place=n not in gone) for n in steps}
    newest_good = [all_of[n] for n in reversed(steps) if n in good and n >= target]
    lying = [all_of[n] for n in reversed(steps) if n not in gone and n >= target]
    every = [SeriesNow(name=NUMBERED, lying=tuple(lying), good=tuple(newest_good), ever_good=True)]
    for name in FIXED:
        updates = sorted(draw(st.sets(st.integers(1, 10))))
        if not updates:
            continue
        shape, counts = draw(st.sampled_from(["full", "weights"])), draw(st.booleans())
        kept = [draw(st.booleans()) for _ in updates]
        contents = [
            fixed(name, g, u, good=k, in_place=u == updates[-1], shape=shape, counts=counts)
            for g, (u, k) in enumerate(zip(updates, kept, strict=True), 1)
        ]
        present = draw(st.booleans())
        lies = contents[-1:] if present else []
        whole = [c for c in reversed(contents) if c.good and (present or not c.in_place)]
        every.append(
            SeriesNow(
                name=name,
                fixed=name,
                lying=tuple(lies),
                good=tuple(whole),
                ever_good=any(kept),
                last=contents[-1],
            )
        )
    return all_of[target], every


@settings(max_examples=200)
@given(places())
def test_every_name_holds_what_is_good_and_not_newer_or_is_refused(place):
    """Told by carrying the plan out on a dict of names."""
    known_good, every = place
    names = {c.path: c for series in every for c in series.lying}
    before = set(names)
    plan = plan_rollback(known_good, every)
    for content in plan.moved:
        assert names.pop(content.path) is content, "what is moved lies there, and is moved once"
    for given_back in plan.given:
        assert given_back.path not in names, "nothing is written over"
        assert given_back.content.good
        names[given_back.path] = given_back.content
    following = next_save(known_good, every)
    fixed_names = {series.fixed: series for series in every if series.fixed}
    for path, content in names.items():
        if path in plan.refused:
            continue
        assert content.good or content.id.number is not None
        assert not is_newer(content, known_good, following)
    assert names.get(known_good.path, known_good).id == known_good.id
    for path in before & set(fixed_names):
        holds = names.get(path)
        may_go = not fixed_names[path].last.has_optimizer
        assert holds is not None or may_go, "no name that holds an optimizer's state is lost"
    if not plan.refused:
        assert known_good.path in names
        newer = [c for c in names.values() if c.id.series == NUMBERED and c.id.number > known_good.id.number]
        assert newer == []


@given(places())
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(place):
    """Planned again from what is there then, it is empty."""
    known_good, every = place
    plan = plan_rollback(known_good, every)
    if plan.refused:
        return
    after = []
    gone, given_back = {c.id for c in plan.moved}, {g.path: g.content for g in plan.given}
    replace = msgspec.structs.replace
    for series in every:
        lying = [c for c in series.lying if c.id not in gone]
        for path, content in given_back.items():
            own = series.fixed is None and path == content.path and content.id.series == series.name
            if path == series.fixed or own:
                generation = content.id.generation if path == content.path else 99
                new = CheckpointId(series.name, content.id.step if series.fixed is None else None, generation)
                lying.append(replace(content, path=path, id=new, in_place=True))
        good = [c for c in lying if c.good]
        after.append(replace(series, lying=tuple(lying), good=tuple(good), last=lying[0] if lying else series.last))
    again = plan_rollback(replace(known_good, in_place=True), after)
    lost = {s.fixed for s in after if s.fixed and not s.lying}  # it could not be given back
    assert again.moved == ()
    assert {g.path for g in again.given} <= lost
    assert again.refused == ()


def is_of_an_earlier_stage(content, known_good):
    """It lies in another folder, and was saved before: its counters are those of another stage."""
    return folder_of(content.path) != folder_of(known_good.path) and content.saved_at < known_good.saved_at


@settings(max_examples=200)
@given(places(), st.data())
def test_no_fixed_name_and_no_pointer_leads_further_than_the_known_good(place, data):
    """By the counters inside, whatever names and the order of saving say: files were copied over others."""
    known_good, every = place
    replace = msgspec.structs.replace

    def copied(content):
        if content.id == known_good.id or not content.counters or not data.draw(st.booleans()):
            return content
        return replace(content, counters={"global_step": data.draw(st.integers(1, 12))})

    same = {}
    for series in every:
        for content in (*series.lying, *series.good):
            if (content.id, content.path) not in same:
                same[content.id, content.path] = copied(content)
    every = [
        replace(
            s,
            lying=tuple(same[c.id, c.path] for c in s.lying),
            good=tuple(same[c.id, c.path] for c in s.good),
        )
        for s in every
    ]
    paths = sorted({c.path for s in every for c in s.lying})
    pointers = [Pointer(key=f"to {path}", names=path, leads=True) for path in paths]
    plan = plan_rollback(known_good, every, pointers)
    names = {c.path: c for series in every for c in series.lying}
    for content in plan.moved:
        del names[content.path]
    names |= {given_back.path: given_back.content for given_back in plan.given}
    names.setdefault(known_good.path, known_good)
    pointed = {p.key: p.path for p in plan.pointed}
    held = [pointed.get(p.key, p.names) for p in pointers if p.key not in plan.refused]
    held += [s.fixed for s in every if s.fixed in names]
    for path in set(held) - set(plan.refused):
        content = names[path]
        assert content.good
        assert not counts_further(content, known_good) or is_of_an_earlier_stage(content, known_good)


def test_pointers_follow_what_they_named():
    """To what its series went back to; what names something older, or nothing that is known, stays."""
    old, new = numbered(1), numbered(2, good=False)
    every = [SeriesNow(name=NUMBERED, lying=(new, old), good=(old,), ever_good=True)]
    named = {"a": new.path, "b": old.path, "c": "net-7.pt", "d": "other_3.pt", "e": "net-7.pt"}
    pointers = [
        Pointer(key=key, names=path, leads=path in (new.path, old.path), sure=key != "e") for key, path in named.items()
    ]
    plan = plan_rollback(old, every, pointers)
    assert {p.key: p.path for p in plan.pointed} == {"a": old.path, "c": old.path}


def test_pointers_of_ranks_name_the_files_of_their_own_ranks():
    """A rank that the save gone back to had not keeps its pointer: another rank's file is not its own."""
    names = {step: tuple(f"model_{step:07d}.rank_{rank}.pth" for rank in range(4)) for step in (99, 199)}
    old, new = (
        Content(
            id=CheckpointId("model_#.rank_#.pth", step, 1),
            path=own[0],
            in_place=True,
            good=step == 99,
            files=own if step == 199 else own[:3],
        )
        for step, own in names.items()
    )
    every = [SeriesNow(name=old.id.series, lying=(new, old), good=(old,), ever_good=True)]
    pointers = [
        Pointer(key=f"last_checkpoint.rank_{rank}", names=new.path, leads=True, sure=False, file=file)
        for rank, file in enumerate(new.files)
    ]
    plan = plan_rollback(old, every, pointers)
    assert plan.moved == (new,)
    assert {p.key: p.path for p in plan.pointed} == {p.key: file for p, file in zip(pointers, old.files, strict=False)}


def test_saves_of_one_moment_belong_together_whatever_their_order():
    """Without a counter that both have, the nearer in time counts: a pair is one save."""
    good, following = numbered(1), 2000
    for written in (999, 1001, 1400):
        pair = Content(id=CheckpointId("ema.pt", None, 1), path="ema.pt", in_place=True, good=True, saved_at=written)
        assert not is_newer(pair, good, following)
    for written in (1999, 2001, 9000):
        pair = Content(id=CheckpointId("ema.pt", None, 1), path="ema.pt", in_place=True, good=True, saved_at=written)
        assert is_newer(pair, good, following)
        assert not is_newer(pair, good, None), "nothing followed"


def test_a_pointer_in_a_folder_without_anything_good_refuses_unless_it_reaches_another():
    """What names a path of the run reaches all of them."""
    old = numbered(1)
    sick = Content(id=CheckpointId("weights/step-#.pt", 2, 1), path="weights/step-2.pt", in_place=True, good=False)
    every = [
        SeriesNow(name=NUMBERED, lying=(old,), good=(old,), ever_good=True),
        SeriesNow(
            name="weights/step-#.pt",
            lying=(sick,),
            ever_good=True,
            last=msgspec.structs.replace(sick, has_optimizer=True),
        ),
    ]
    for far, sure in ((True, True), (False, True), (False, False)):
        plan = plan_rollback(old, every, [Pointer(key="latest", names=sick.path, leads=True, far=far, sure=sure)])
        assert plan.moved == (sick,)
        assert [p.path for p in plan.pointed] == ([old.path] if far else [])
        assert plan.refused == (("latest",) if sure and not far else ())


@pytest.mark.parametrize(
    ("name", "other", "counters", "has_optimizer", "of_one_training"),
    [
        ("base.pt", "chat.pt", {}, False, False),
        ("en/weights.pt", "de/weights.pt", {}, False, False),
        ("net_seed0.pt", "net_seed1.pt", {"epoch": 3}, True, False),
        ("fold1_last.pt", "fold2_best.pt", {}, False, False),
        ("base.pt", "chat.pt", {"epoch": 3}, False, True),
        ("ours.pt", "backup.pt", {}, True, True),
        ("last.pt", "net.pt", {}, False, True),
        ("net.pt", "net_best.pt", {}, False, True),
    ],
)
def test_no_model_is_replaced_by_another(name, other, counters, has_optimizer, of_one_training):
    """A name gets another one's content only where names or contents tell that one training has saved both."""

    def content(path, *, good):
        id = CheckpointId(path, None, 1)
        return Content(
            id=id, path=path, in_place=True, good=good, counters=counters, has_optimizer=has_optimizer, shape="same"
        )

    sick, good = content(name, good=False), content(other, good=True)
    every = [
        SeriesNow(name=other, fixed=other, lying=(good,), good=(good,), ever_good=True, last=good),
        SeriesNow(name=name, fixed=name, lying=(sick,), last=sick),
    ]
    plan = plan_rollback(good, every)
    assert [(given_back.path, given_back.content) for given_back in plan.given] == [(name, good)] * of_one_training
    assert plan.refused == (() if of_one_training else (name,))


PATHS = st.lists(st.sampled_from(["", "a", "b", "a/c", "a/d", "b/c"]), max_size=1).map("".join)
NAMES = st.sampled_from(["last.pt", "epoch_#.pt", "best.pt", "ckpt.pt"])
SERIES = st.sets(st.tuples(PATHS, NAMES).map(lambda pair: "/".join(pair).lstrip("/")), min_size=1, max_size=7)


@given(SERIES)
def test_folders_are_told_apart_by_names_that_lie_in_two(series):
    """Of each training no name lies twice, and it has all folders below one; around that one a name does."""
    folders = {os.path.dirname(name) for name in series}
    trainings = {folder: folders_of_training(folder, series) for folder in folders}

    def clashes(top):
        below = [os.path.basename(name) for name in series if name.startswith(f"{top}/") or not top]
        return len(below) > len(set(below))

    for folder, training in trainings.items():
        assert folder in training
        assert all(trainings[other] == training for other in training & folders), (
            "they are told alike from each of them"
        )
        tops = [folder]
        while tops[-1]:
            tops.append(os.path.dirname(tops[-1]))
        clean = [top for top in tops if not clashes(top)]
        top = clean[-1] if clean else None
        right = {f for f in folders if top is not None and (f == top or f.startswith(f"{top}/") or not top)}
        assert training == right | {folder}


def test_what_two_trainings_look_like():
    """A sweep, two stages, two parts of one model, a copy somebody made."""
    sweep = {"seed0/epochs/epoch_#.pt", "seed0/last.pt", "seed1/epochs/epoch_#.pt", "seed1/last.pt"}
    assert folders_of_training("seed0/epochs", sweep) == {"seed0", "seed0/epochs"}
    assert folders_of_training("models", {"models/net_g_#.pth", "training_states/#.state"}) == {
        "models",
        "training_states",
    }
    assert folders_of_training("", {"last.pt", "backup/last.pt"}) == {""}
    assert folders_of_training("backup", {"last.pt", "backup/last.pt"}) == {"backup"}
    assert folders_of_training("", {"G_#.pth", "D_#.pth"}) == {""}
