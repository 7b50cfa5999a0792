"""Output of a run: numbers of a step (`record.py`), console and log text (`logger.py`), plots (`plot.py`)."""
