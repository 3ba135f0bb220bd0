"""The demo: real pictures and pretrained towers from installed packages, up to a served index."""
