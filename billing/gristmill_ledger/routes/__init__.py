"""HTTP routes, one module for each kind of caller's need."""
