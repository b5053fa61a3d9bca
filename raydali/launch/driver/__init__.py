"""Code that runs in the driver, from the command line to the end of the run."""
