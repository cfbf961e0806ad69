"""The chain of each tenant's rows: how it grows, how its heads are signed, how it is verified."""
