"""What a run tells: `record.py` the numbers of a step, `logger.py` all text for people, `plot.py` the picture."""
