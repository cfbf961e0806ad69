"""The command line, and the embedded mode: `gristmill up` runs all parts on this machine."""
