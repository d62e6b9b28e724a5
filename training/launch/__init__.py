"""From a command to processes on this machine: the supervisor and its agent, and what other launchers say and need."""
