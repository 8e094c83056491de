"""What tests share: builders of runs and files, damage, processes, faulty storages."""
