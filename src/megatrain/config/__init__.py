"""The config of a run: `schema` defines the keys, `load` reads a config, `docs` describes the keys."""
