"""How long tests wait for something that must happen."""

PATIENCE = 300.0
"""Seconds after which a test says that it hangs. No test waits so long on a machine that has other work, and none waits
for this time to pass."""
