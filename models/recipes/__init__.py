"""Packaged recipes: one `.toml` each, for `hivlp train NAME`."""
