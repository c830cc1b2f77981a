"""What everything shares: types, sampling, noise, the config loader, component files, signals."""
