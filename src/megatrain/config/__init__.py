"""The config of a run: `schema.py` says what there is, `load.py` reads it, `help.py` and `docs.py` explain it."""
