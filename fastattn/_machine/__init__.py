"""What the process runs on: CPU and environment, threads and forks, arrays of others, constants."""
