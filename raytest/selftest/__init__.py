"""raytest's own examination: planted faults, what catches them, and false alarms."""
