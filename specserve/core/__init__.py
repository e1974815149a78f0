"""Types, configuration, errors and metrics: imports no engine, no server."""
