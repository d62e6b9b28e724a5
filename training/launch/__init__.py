"""From a command to processes on hosts: the supervisor and its agents, and what other launchers say and need."""
