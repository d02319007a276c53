"""Ask the files: do the shared objects of an environment find their symbols and libraries? Nothing is loaded."""
