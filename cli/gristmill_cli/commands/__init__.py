"""One module for each group of commands. They find a running instance by its data folder."""
