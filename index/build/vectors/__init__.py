"""Vectors that somebody else made: read, rotated so that they nest, and published as an index."""
