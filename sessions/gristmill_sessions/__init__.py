"""Which state a session is in, what should happen next, and where its resources are kept. Pure but for `local`."""
