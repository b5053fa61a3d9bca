"""`raydali bench strategies`: DataParallel, DDP, SyncBatchNorm and AMP compared."""
