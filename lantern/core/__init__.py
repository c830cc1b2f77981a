"""What everything shares: types, sampling and noise, configs, component files, weights, the process."""
