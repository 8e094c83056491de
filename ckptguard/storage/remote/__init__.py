"""Storage on an object store or any other remote fsspec file system."""
