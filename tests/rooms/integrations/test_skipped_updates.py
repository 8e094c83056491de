"""Updates that are left out cost nothing else, with a loss scaler and without."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ckptguard.integrations.trainer_callback import SkippedUpdates  # noqa: E402

pytestmark = pytest.mark.torch


class Loop:
    """What a Trainer's loop does around its training_step."""

    def __init__(self, *, scaled: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaled)
        self.accelerator = SimpleNamespace(scaler=self.scaler)
        self.args = SimpleNamespace(device="cpu")
        self.state = SimpleNamespace(global_step=0)
        self.logged = {}

    def log(self, logs):
        self.logged = logs

    def training_step(self, model, inputs):
        loss = model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        return loss.detach()

    def update(self, left_out: SkippedUpdates) -> None:
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(self.state.global_step))
        self.training_step(self.model, batch)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.state.global_step += 1
        left_out.after_update(self.state.global_step)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_update_left_out_changes_nothing_at_all(scaled):
    """Weights, moments, their step counts and the loss scale are as they were."""
    loop = Loop(scaled=scaled)
    with SkippedUpdates(loop) as left_out:
        left_out.updates = {3, 4}
        for _ in range(2):
            loop.update(left_out)
        weights = {k: v.clone() for k, v in loop.model.state_dict().items()}
        steps = [state["step"].item() for state in loop.optimizer.state.values()]
        for _ in range(2):
            loop.update(left_out)
        assert all(torch.equal(v, weights[k]) for k, v in loop.model.state_dict().items())
        assert [state["step"].item() for state in loop.optimizer.state.values()] == steps == [2, 2]
        assert loop.scaler.get_scale() == (64.0 if scaled else 1.0)
        loop.update(left_out)
        assert [state["step"].item() for state in loop.optimizer.state.values()] == [3, 3]
    assert not {"training_step", "log"} & vars(loop).keys()


def test_the_first_loss_that_was_not_finite_is_remembered():
    """However late it is asked for, and not for updates that are known to be healthy."""
    loop = Loop(scaled=False)
    with SkippedUpdates(loop) as left_out:
        for update in range(1, 6):
            if update == 3:
                with torch.no_grad():
                    loop.model.weight.mul_(1e38).mul_(1e38)
            loop.update(left_out)
        assert left_out.first_bad_loss(after=0) == 3
        assert left_out.first_bad_loss(after=4) == 5
        left_out.forget(through=5)
        assert left_out.first_bad_loss(after=0) is None
