"""The HTTP server, the command line and the benchmarks."""
