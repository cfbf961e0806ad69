"""The embedded mode: one supervisor starts, watches and connects the parts of one machine."""
