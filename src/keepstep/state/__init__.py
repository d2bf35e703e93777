"""What survives: everything that a resumed run needs to be the same run."""
