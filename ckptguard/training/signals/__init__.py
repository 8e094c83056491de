"""How training is seen to be sick: losses, gradients, weights, the scaler."""
