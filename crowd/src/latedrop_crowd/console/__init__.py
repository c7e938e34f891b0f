"""The operator's console: live counts with their doubt, zones with limits, alarms, labels; served as a local page."""
