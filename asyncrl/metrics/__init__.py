"""What a run tells: readers of run.db, the live view, summaries and trackers."""
