"""The learner: FSDP2 ranks that train on sealed batches and publish weights."""
