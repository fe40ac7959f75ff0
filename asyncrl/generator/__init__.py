"""The generator process: an inference engine, environments and the stream of chunks to the hub."""
