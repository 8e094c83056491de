"""The signals that show a sick training: losses, gradients, weights, the scaler."""
