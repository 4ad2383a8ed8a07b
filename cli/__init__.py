"""The front door: commands, scenario files, reports."""
