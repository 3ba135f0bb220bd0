"""The endpoints. A route reads a request, asks for a permit, and hands over; nothing else."""
