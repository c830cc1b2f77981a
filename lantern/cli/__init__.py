"""The commands `lantern` and `lantern-generate`: one file a command, nothing heavy before parsing."""
