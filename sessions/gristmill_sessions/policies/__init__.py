"""One policy a module: each looks at a session and answers with a plan, or leaves it to the next."""
