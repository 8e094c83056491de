"""torch's own GradScaler under fp16 autocast, whose overflows are real: in a plain loop, and inside Accelerate."""

import pytest
from support.runs import QUICK

import ckptguard
import ckptguard.integrations
from ckptguard.decisions.rollback_policy import RollbackPolicy
from ckptguard.records.incidents import list_incidents
from ckptguard.records.run import open_run

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

MILD, HOT = 300.0, 6e4  # overflows where the scale is 1024; overflows in the forward pass, whatever the scale


class Plain:
    """A loop that scales its losses by itself."""

    def __init__(self, scale: float, **policy) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        with torch.no_grad():
            self.model.weight.fill_(0.5)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
        self.policy = RollbackPolicy(**policy)
        self.taken: list[int] = []  # the numbers of the batches, replays included
        self.states: list[dict] = []  # the scaler's, after each update

    def guard(self, run):
        return ckptguard.TrainingGuard(
            run,
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            daemon="off",
            settings=QUICK,
            policy=self.policy,
        )

    def update(self, size: float):
        with torch.autocast("cpu", torch.float16):
            found = self.model(torch.full((2, 4), size))
        loss = found.float().square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss, norm

    def train(self, run, sizes: dict[int, float], *, total: int = 12) -> list[str]:
        """Train on batches that are tame unless `sizes` says otherwise; the causes of the incidents."""
        data = [(number, sizes.get(number, 1.0)) for number in range(30)]
        with self.guard(run) as guard:
            for _, (number, size) in guard.steps(data, total=total, save_every=4):
                self.taken.append(int(number))
                loss, norm = self.update(float(size))
                self.states.append(self.scaler.state_dict())
                guard.observe(loss=loss, grad_norm=norm)
        assert all(p.isfinite().all() for p in self.model.parameters())
        return [incident.cause for incident in list_incidents(open_run(str(run)))]


class Accelerated(Plain):
    """The same under Accelerate, which makes a scaler by itself for devices only."""

    def __init__(self, scale: float, **policy) -> None:
        accelerate = pytest.importorskip("accelerate")
        super().__init__(scale, **policy)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
        self.accelerator.native_amp, self.accelerator.scaler = True, self.scaler
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def guard(self, run):
        return ckptguard.integrations.accelerate.guard(
            self.accelerator,
            run,
            model=self.model,
            optimizer=self.optimizer,
            daemon="off",
            settings=QUICK,
            policy=self.policy,
        )

    def update(self, size: float):
        loss = self.model(torch.full((2, 4), size)).float().square().mean()
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm


@pytest.fixture(params=[Plain, Accelerated])
def loop(request):
    """Both loops; Accelerate's state is global and is left as it was."""
    yield request.param
    if request.param is Accelerated:
        import accelerate

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_two_overflows_of_a_healthy_scaler_are_no_incident(tmp_path, loop):
    """The scaler leaves those updates out and halves its scale: that is how it works."""
    made = loop(1024.0)
    assert made.train(tmp_path, {5: MILD, 6: MILD}) == []
    assert made.taken == list(range(12))
    assert [state["scale"] for state in made.states[4:8]] == [2048.0, 1024.0, 512.0, 512.0]


def test_overflows_in_a_row_are_an_incident_and_the_scaler_comes_back(tmp_path, loop):
    """Scale and growth tracker are those of the save; the batches that overflow at any scale are left out."""
    made = loop(1024.0)
    assert made.train(tmp_path, dict.fromkeys(range(6, 11), HOT)) == ["loss_scale"]
    assert made.taken == [*range(11), 4, 5, *range(11, 17)]
    before, after = made.states[4:6], made.states[11:13]
    assert before == after


def test_a_scale_at_its_floor_is_an_incident_and_is_raised(tmp_path, loop):
    """GradScaler would go on to 0. It goes back to before that, and up to where it can fall again."""
    made = loop(4.0, reset_scale=128.0)
    assert made.train(tmp_path, dict.fromkeys(range(5, 8), HOT)) == ["loss_scale"]
    assert min(state["scale"] for state in made.states) >= 1.0
    assert made.states[made.taken.index(4)]["scale"] == 8.0
    assert made.states[made.taken.index(4, 5)]["scale"] == 128.0


def test_the_policy_may_leave_the_scale_as_it_was_saved(tmp_path, loop):
    """``reset_scale=None``."""
    made = loop(4.0, reset_scale=None)
    assert made.train(tmp_path, dict.fromkeys(range(5, 8), HOT)) == ["loss_scale"]
    assert made.states[made.taken.index(4)] == made.states[made.taken.index(4, 5)]


class Forgetful(Plain):
    """A loop that does not tell the guard of its scaler."""

    def guard(self, run):
        return ckptguard.TrainingGuard(
            run, model=self.model, optimizer=self.optimizer, daemon="off", settings=QUICK, policy=self.policy
        )


def test_a_scaler_that_the_guard_was_not_given_is_suggested_where_it_skipped(tmp_path, caplog, monkeypatch):
    """The log says so at once, and the report's first cause too. Where none works, none is suggested."""
    made = Forgetful(1024.0)
    assert made.train(tmp_path / "run", {5: MILD}) == ["grad_norm"]
    assert "a GradScaler works here: if it skipped step 6, give it to the guard, as scaler=" in caplog.text
    report = ckptguard.incident(tmp_path / "run")
    assert report.details.causes[0].name == "scaler_not_given"
    assert "TrainingGuard(..., scaler=scaler)" in str(report)
    assert "uses no loss scaler" not in str(report)

    caplog.clear()
    others = [torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu"), made.model, made]
    monkeypatch.setattr("gc.get_objects", lambda: others)  # one is off, and one scales nothing
    assert made.train(tmp_path / "other", {5: MILD}) == ["grad_norm"]
    assert "GradScaler" not in caplog.text
    assert "scaler_not_given" not in {cause.name for cause in ckptguard.incident(tmp_path / "other").details.causes}
