"""The parameters of a request: sampling, pooling, structured outputs, adapters, processors."""
