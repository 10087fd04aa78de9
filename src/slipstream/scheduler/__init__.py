"""The host half: which tokens of which requests the next step computes. numpy only."""
