"""What finds the nearest vectors, and keeps them safe: levels, cascade, snapshots, builds."""
