"""Keras' ModelCheckpoint with its torch backend: each epoch ``epoch-03.weights.h5``, the weights and the optimizer's
variables. The user loads those of the last epoch and fits on from there."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import packages  # first

# isort: split

import keras
from tells import FROM, LAST, RUN, Tells, newest, torch

packages.torch.set_num_threads(1)


def main(suffix):
    """Train to the last save."""
    RUN.mkdir(exist_ok=True)
    tells = Tells(RUN)
    keras.utils.set_random_seed(0)
    found = RUN / FROM if FROM else newest(f"epoch-*{suffix}")
    if found is not None and suffix == ".keras":
        model = keras.models.load_model(found)
    else:
        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32), keras.layers.Dense(16)])
        model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mse")
        model.optimizer.build(model.trainable_variables)
        if found is not None:
            model.load_weights(found)

    def state():
        parts = {"model": model.variables, "optimizer": model.optimizer.variables}
        return {
            name: {str(n): torch.as_tensor(v.value).detach().clone() for n, v in enumerate(variables)}
            for name, variables in parts.items()
        }

    class Saves(keras.callbacks.ModelCheckpoint):
        """What the user gives to `fit`, with a word to the test."""

        def on_epoch_end(self, epoch, logs=None):
            if tells.is_poisoned(epoch + 1):
                for variable in model.variables:
                    variable.assign(torch.full_like(torch.as_tensor(variable.value), torch.nan))
            tells.writes()
            super().on_epoch_end(epoch, logs)
            tells.saved(epoch + 1, state(), RUN / f"epoch-{epoch + 1:02d}{suffix}")

    number = 0 if found is None else int(found.name.removeprefix("epoch-").partition(".")[0])
    tells.started(number, state() if number else None)
    for epoch in range(number, LAST):
        batch = tells.batch(epoch + 1, 4, 16)
        saves = Saves(str(RUN / ("epoch-{epoch:02d}" + suffix)), save_weights_only=suffix != ".keras")
        model.fit(batch, batch, initial_epoch=epoch, epochs=epoch + 1, verbose=0, callbacks=[saves])


if __name__ == "__main__":
    main(".weights.h5")
