"""NumPy's files: npy and npz."""
