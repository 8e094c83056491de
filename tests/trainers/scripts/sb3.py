"""stable-baselines3's CheckpointCallback: ``rl_model_40_steps.zip``, a zip of torch files and JSON; the user resumes
from the one with the most steps."""

import packages  # first

# isort: split

import gymnasium
import numpy as np
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import CheckpointCallback
from tells import FROM, LAST, RUN, Tells, newest

STEPS = 20

packages.torch.set_num_threads(1)


class Walk(gymnasium.Env):
    """Sixteen numbers that a move shifts."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (16,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=0)
        self._at = 0
        return self._seen(), {}

    def step(self, action):
        self._at += 1
        return self._seen(), float(action), self._at % 10 == 0, False, {}

    def _seen(self):
        return np.roll(np.linspace(-1, 1, 16, dtype=np.float32), self._at)


RUN.mkdir(exist_ok=True)
tells = Tells(RUN)
found = RUN / FROM if FROM else newest("rl_model_*_steps.zip")
if found is not None:
    model = DQN.load(found, env=Walk(), device="cpu")
else:
    small = {
        "learning_starts": 4,
        "batch_size": 4,
        "train_freq": 2,
        "buffer_size": 50,
        "policy_kwargs": {"net_arch": [32]},
    }
    model = DQN("MlpPolicy", Walk(), seed=0, device="cpu", **small)


def state():
    return {"policy": model.policy.state_dict(), "optimizer": model.policy.optimizer.state_dict()["state"]}


class Saves(CheckpointCallback):
    """What the user gives to `learn`, with a word to the test."""

    def _on_step(self):
        number = self.num_timesteps // self.save_freq
        if self.n_calls % self.save_freq == 0 and tells.is_poisoned(number):
            packages.poison(self.model.policy)
        going_on = super()._on_step()
        if self.n_calls % self.save_freq == 0:
            tells.saved(number, state(), self._checkpoint_path(extension="zip"))
        return going_on


number = model.num_timesteps // STEPS
tells.started(number, state() if number else None)
if number < LAST:
    model.learn((LAST - number) * STEPS, callback=Saves(STEPS, str(RUN)), reset_num_timesteps=False)
