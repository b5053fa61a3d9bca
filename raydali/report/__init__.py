"""What a run leaves behind and shows: its folder of files, its trace of samples, the console."""
