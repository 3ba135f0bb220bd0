"""What people talk to: the HTTP service, its page, the command line, the demo."""
