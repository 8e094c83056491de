"""torchdata's StatefulDataLoader: put back exactly where it was, without drawing its batches again."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from ckptguard.training.content.tagged_json import decode_state, encode_state  # noqa: E402
from ckptguard.training.state.data_position import DataPosition  # noqa: E402
from ckptguard.training.state.rng import capture_rng, restore_rng  # noqa: E402

pytestmark = [
    pytest.mark.writers,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata of torch
]


class Counting(torch.utils.data.Dataset):
    """Numbers, and how often one was asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.asked += 1
        return index


class Stream(torch.utils.data.IterableDataset):
    """Numbers in a row, which knows where it is."""

    def __init__(self) -> None:
        self.at = self.begin_at = 0

    def __iter__(self):
        self.at, self.begin_at = self.begin_at, 0
        while self.at < 12:
            self.at += 1
            yield self.at - 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.begin_at = state["at"]


def drawn(position, count):
    """The next batches, as lists."""
    return [position.draw()[0].tolist() for _ in range(count)]


def through_json(state):
    """As it is saved beside a checkpoint."""
    return decode_state(json.loads(json.dumps(encode_state(state, path="data"))))


def shuffled():
    return StatefulDataLoader(Counting(), batch_size=2, shuffle=True)


def streamed():
    return StatefulDataLoader(Stream(), batch_size=2)


@pytest.mark.parametrize("make", [shuffled, streamed])
@pytest.mark.parametrize("taken", [0, 3, 6, 9])
def test_the_same_batches_come_again(make, taken):
    """In the same process and in another one; at the beginning, inside and at the end of an epoch."""
    torch.manual_seed(0)
    loader = make()
    position = DataPosition(loader)
    drawn(position, taken)
    state, rng = through_json(position.state()), capture_rng()
    expected = drawn(position, 10)
    for again in (position, DataPosition(make())):
        again.restore(state)
        restore_rng(rng)
        assert drawn(again, 10) == expected


def test_nothing_is_drawn_again():
    """Five batches were taken; coming back asks for no sample."""
    loader = shuffled()
    position = DataPosition(loader)
    drawn(position, 5)
    state = position.state()
    asked = loader.dataset.asked
    position.restore(state)
    assert loader.dataset.asked == asked


class Own(torch.utils.data.Sampler):
    """A sampler that keeps no state."""

    def __len__(self):
        return 12

    def __iter__(self):
        return iter(torch.randperm(12).tolist())


def test_a_sampler_without_state_is_drawn_again():
    """Its order would be another one; so the slower way is taken, and the batches are the same."""
    position = DataPosition(StatefulDataLoader(Counting(), batch_size=2, sampler=Own()))
    drawn(position, 3)
    state, rng = position.state(), capture_rng()
    expected = drawn(position, 10)
    position.restore(state)
    restore_rng(rng)
    assert drawn(position, 10) == expected
