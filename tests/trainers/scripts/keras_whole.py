"""The same, with the whole model of each epoch: ``epoch-03.keras``."""

from keras_checkpoint import main

if __name__ == "__main__":
    main(".keras")
