"""The options of jobs and of commands on trained runs, and the defaults that depend on facts about a run."""
