"""Messages between a replica and its drafters: ZeroMQ, msgspec structs and raw tensor frames."""
