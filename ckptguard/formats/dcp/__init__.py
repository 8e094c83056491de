"""torch.distributed.checkpoint's files: `.metadata` and `.distcp`."""
